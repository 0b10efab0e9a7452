"""Parts an answer's text into thoughts, text and calls, piece by piece. Pure.

An answer is a stranger's: what is held back of it is bounded, and each character is looked at a
bounded number of times, however the answer is cut into pieces.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from client.gateway.structured.call_formats import PYTHON_TAG, CallFormat, steps_of
from client.gateway.structured.call_pieces import CallBegun, CallGrows, CallPiece, CallPieces
from client.gateway.structured.calls import Call, call_of, calls_in
from client.gateway.structured.channels import HEAD_CHARS_MAX, Channels, Head, head_of
from client.gateway.structured.json_text import JsonText
from client.gateway.structured.schemas import ArgumentTypes, Schema

CALL_CHARS_MAX = 1 << 20
"""Maximum characters of a call; what is longer is text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """Text that the model thinks; empty where thoughts end without any."""

    text: str


AnswerPart = str | Thought | Call | CallPiece


class _Place(Enum):
    """What the text that comes next belongs to."""

    BEGINNING = "beginning"
    """Nothing yet but white space: what comes first decides."""
    HEAD = "head"
    THOUGHT = "thought"
    ASIDE = "aside"
    """Thoughts from the mark of a call on: calls, if nothing but white space follows them."""
    TEXT = "text"
    CALL = "call"


HELD_MAX = {
    _Place.HEAD: HEAD_CHARS_MAX,
    _Place.CALL: CALL_CHARS_MAX,
    _Place.ASIDE: CALL_CHARS_MAX,
}
"""Maximum characters that are held back until their end has come."""
NO_PARAMETERS: Mapping[str, Schema] = {}


class AnswerReader:
    """Reads one answer; how its text is cut into pieces changes nothing.

    Models may call from within their thoughts, and end the answer there or close the thoughts
    behind it (DeepSeek V3.1, Qwen 3.5). Such calls count where nothing else follows. Calls that
    more thoughts or an answer follow are examples or plans, and stay thoughts.
    """

    def __init__(
        self,
        calls: CallFormat | None,
        channels: Channels | None,
        *,
        opened: str | None = None,
        parameters: Mapping[str, Schema] = NO_PARAMETERS,
        in_pieces: bool = False,
    ) -> None:
        """``in_pieces``: calls are told of as they come, in pieces, and not once they are whole.
        ``opened`` is the head of what the prompt ends within (:meth:`Channels.opened_by`);
        ``parameters`` has the schemas of the functions' arguments by their names."""
        self._messages = channels if channels is not None and channels.says else None
        is_read = calls is not None and calls.in_channel == (self._messages is not None)
        self._calls = calls if is_read else None
        self._channels = channels
        self._parameters, self._types = parameters, ArgumentTypes(parameters)
        self._place = _Place.HEAD if self._messages is not None else _Place.BEGINNING
        self._thought = False
        """Whether thoughts between two marks have begun; they begin once."""
        self._otherwise = _Place.TEXT
        """What an answer is that begins with no mark."""
        self._aside: list[AnswerPart] = []
        """The calls at the end of the thoughts; they count if the answer ends with them."""
        self._aside_raw = ""
        """The text of these."""
        self._head = Head(is_thought=False)
        self._tail = ""
        """The end of the text so far, where a mark may have begun."""
        self._held: list[str] = []
        """The text of a head, a call, or the white space of a beginning."""
        self._held_chars = 0
        self._found: list[AnswerPart] = []
        self._in_pieces = in_pieces
        self._pieces: CallPieces | None = None
        """Tells of the call that is held back."""
        self._json = JsonText()
        """Where what is held back of calls stands, if their arguments are JSON."""
        self._in_value = False
        """Whether what is held back of a call ends within an argument in tags."""
        self._marks = {place: _Marks(self._marks_at(place)) for place in _Place}
        if opened is not None and self._messages is not None:
            self._hold(opened)
            self._begin_message(self._messages.says)
        elif opened is not None and channels is not None:
            self._otherwise = _Place.THOUGHT

    def _marks_at(self, place: _Place) -> tuple[str, ...]:
        """The marks that end what is at ``place``, or begin something in it."""
        calls, channels = self._calls, self._channels
        if self._messages is not None:
            says = (self._messages.says,) if place is _Place.HEAD else ()
            return (*self._messages.opens, *self._messages.closes, *says)
        match place:
            case _Place.THOUGHT if channels is not None:
                return (*channels.closes, *self._call_begins)
            case _Place.ASIDE if channels is not None:
                return channels.closes
            case _Place.TEXT if calls is not None:
                return tuple(filter(None, (calls.begins, calls.opens, calls.ends)))
            case _Place.CALL if calls is not None and calls.closes:
                return (calls.closes, *_argument_marks(calls))
        return ()

    @property
    def _call_begins(self) -> tuple[str, ...]:
        calls = self._calls
        return () if calls is None else tuple(filter(None, (calls.begins, calls.opens)))

    def push(self, text: str) -> list[AnswerPart]:
        """Parts that became certain with ``text``."""
        self._found = []
        text, self._tail, at = self._tail + text, "", 0
        while at < len(text):
            if self._place is _Place.BEGINNING:
                at = self._decide(text, at)
                continue
            end, mark = self._marks[self._place].first(text, at)
            if self._place in HELD_MAX:
                room = max(0, HELD_MAX[self._place] - self._held_chars)
                if end - at > room:
                    self._take(text[at : at + room])
                    at += room
                    self._give_up()
                    continue
            self._take(text[at:end])
            at = end + len(mark)
            if not mark:
                self._tail, at = text[end:], len(text)
            else:
                self._cross(mark)
        return _joined(self._found)

    def flush(self) -> list[AnswerPart]:
        """The parts that were held back, at the end of the answer."""
        self._found = []
        self._take(self._tail)
        self._tail = ""
        match self._place:
            case _Place.CALL:
                self._end_call(is_whole=False)
            case _Place.HEAD if not self._begins_message():
                self._give_up()
            case _Place.ASIDE:
                self._end_aside()
                self._found += self._aside
            case _Place.BEGINNING if self._aside:
                self._found += self._aside
            case _Place.BEGINNING:
                self._give_up()
        return _joined(self._found)

    def _decide(self, text: str, at: int) -> int:
        """What the answer begins with; returns where to go on."""
        start = _BLANKS.match(text, at)
        begins = at if start is None else start.end()
        self._hold(text[at:begins])
        if begins == len(text):
            return begins
        self._forget_aside()
        leads: dict[str, _Place] = {}
        if self._channels is not None and not self._thought:
            leads[self._channels.opens[0]] = _Place.THOUGHT
        is_text = self._otherwise is _Place.TEXT
        if is_text and self._calls is not None and not self._calls.opens:
            leads |= {PYTHON_TAG: _Place.BEGINNING, "{": _Place.CALL}
        for mark, place in leads.items():
            if text.startswith(mark, begins):
                self._place = place
                if place is _Place.CALL:
                    self._begin_call()
                    return begins
                if place is _Place.THOUGHT:
                    self._thought = True
                    self._release()
                return begins + len(mark)
        rest = text[begins : begins + _LEAD_CHARS]
        if any(mark.startswith(rest) for mark in leads):
            self._tail = rest
            return len(text)
        self._give_up()
        return begins

    def _cross(self, mark: str) -> None:
        if self._messages is not None:
            self._cross_of_message(mark, self._messages)
            return
        match self._place:
            case _Place.THOUGHT if mark in self._call_begins:
                self._place = _Place.ASIDE
                self._hold(mark)
            case _Place.THOUGHT | _Place.ASIDE:
                if self._place is _Place.ASIDE:
                    self._end_aside()
                self._found.append(Thought(text=""))
                bare = self._calls is not None and not self._calls.opens
                self._thought, self._otherwise = True, _Place.TEXT
                self._place = _Place.BEGINNING if bare or self._aside else _Place.TEXT
            case _Place.CALL if self._calls is not None:
                if mark == self._calls.closes and not (self._json.in_string or self._in_value):
                    self._hold(mark)
                    self._end_call(is_whole=True)
                    return
                begins, ends = _argument_marks(self._calls) or ("", "")
                self._in_value = mark == begins or (self._in_value and mark != ends)
                self._take(mark)
            case _Place.TEXT if self._calls is not None and mark == self._calls.opens:
                self._begin_call()
                self._hold(mark)

    def _end_aside(self) -> None:
        """End thoughts that have what may be calls at their end."""
        raw = self._release()
        reader = AnswerReader(self._calls, None, parameters=self._parameters)
        parts = [*reader.push(raw), *reader.flush()]
        calls = [part for part in parts if isinstance(part, Call)]
        rest = "".join(part for part in parts if isinstance(part, str))
        if calls and not rest.strip():
            self._aside, self._aside_raw = list(calls), raw
        else:
            self._found.append(Thought(text=raw))

    def _forget_aside(self) -> None:
        """Take the calls at the end of the thoughts for thoughts: an answer follows."""
        if self._aside:
            self._found.append(Thought(text=self._aside_raw))
            self._aside, self._aside_raw = [], ""

    def _begin_call(self, name: str = "") -> None:
        """Begin to hold back what calls a function, or several; ``name``: which, if it is known."""
        self._place = _Place.CALL
        calls = self._calls
        self._json = JsonText("{[" if calls is not None and calls.is_list else "{")
        self._in_value = False
        self._pieces = None
        if self._in_pieces and calls is not None:
            self._pieces = CallPieces(calls, self._types, name)

    def _cross_of_message(self, mark: str, channels: Channels) -> None:
        if self._place is _Place.CALL and self._json.in_string:
            self._take(mark)
            return
        if mark == channels.says:
            self._begin_message(mark)
            return
        if self._place is _Place.CALL:
            self._end_call(is_whole=True)
        elif self._place is _Place.HEAD:
            if mark in channels.closes and self._begins_message():
                self._release()
            elif mark in channels.closes or self._held_chars + len(mark) > HEAD_CHARS_MAX:
                self._give_up()
        self._place = _Place.HEAD
        if mark in channels.opens:
            self._hold(mark)

    def _begins_message(self) -> bool:
        """Whether what is held is a head: it has a mark."""
        opens = () if self._messages is None else self._messages.opens
        return any(each in opens for each in self._held)

    def _begin_message(self, mark: str) -> None:
        """Begin the text of a message behind its head and ``mark``."""
        self._head = head_of("".join(self._held))
        if self._head.calls and self._calls is not None:
            self._begin_call(self._head.calls)
            self._hold(mark)
            self._held_chars = 0
            return
        self._release()
        self._place = _Place.THOUGHT if self._head.is_thought else _Place.TEXT

    def _end_call(self, *, is_whole: bool) -> None:
        if is_whole and self._pieces is not None and self._calls is not None:
            self._found += self._pieces.push(self._calls.closes)
        raw = self._release()
        self._place = _Place.TEXT
        calls: Iterable[Call] = ()
        if self._messages is not None:
            written = raw.rpartition(self._messages.says)[2]
            call = call_of(self._head.calls, written)
            calls = () if call is None else (call,)
        elif self._calls is not None:
            calls = calls_in(raw, self._calls, self._types, is_whole=is_whole)
        told, self._pieces = self._pieces, None
        if told is None or not told.begun:
            self._found += list(calls) or [raw]
            return
        calls = list(calls)
        if len(calls) >= told.begun:
            self._found += told.rest_of(calls[told.begun - 1])
        self._found += calls[told.begun :]

    def _give_up(self) -> None:
        """Take what is held back for text, or for thoughts where it stands within them."""
        is_thought = self._place is _Place.ASIDE
        self._place = _Place.THOUGHT if is_thought else self._otherwise
        told, self._pieces = self._pieces, None
        if told is not None and told.begun:  # a call that is too long is not told twice
            self._release()
        self._take(self._release())

    def _take(self, text: str) -> None:
        """Take text that holds no mark."""
        if not text:
            return
        match self._place:
            case _Place.TEXT:
                self._found.append(text)
            case _Place.THOUGHT:
                self._found.append(Thought(text=text))
            case _Place.CALL:
                self._hold(text)
                if self._calls is not None and self._calls.is_json:
                    self._json.push(text)
                if self._pieces is not None:
                    self._found += self._pieces.push(text)
            case _:
                self._hold(text)

    def _hold(self, text: str) -> None:
        if text:
            self._held.append(text)
            self._held_chars += len(text)

    def _release(self) -> str:
        held, self._held, self._held_chars = "".join(self._held), [], 0
        return held


def reads(form: CallFormat, channels: Channels | None, written: str, call: Call) -> bool:
    """Whether an answer ``written`` by a chat template reads as ``call`` in this form; what the
    template puts behind it does not count. A text without the form's mark tells nothing."""
    if form.opens.strip() not in written or not form.opens:
        return True

    def parts(*, in_pieces: bool) -> list[AnswerPart]:
        reader = AnswerReader(form, channels, in_pieces=in_pieces)
        return [*reader.push(written), *reader.flush()]

    names = [part.name for part in parts(in_pieces=True) if isinstance(part, CallBegun)]
    grown = [part.arguments for part in parts(in_pieces=True) if isinstance(part, CallGrows)]
    arguments = call_of(call.name, "".join(grown))
    return call in parts(in_pieces=False) or (names == [call.name] and arguments == call)


def _argument_marks(calls: CallFormat) -> tuple[str, str] | tuple[()]:
    """The marks that begin and end an argument in tags; none where arguments are JSON."""
    marks = [step for step in steps_of(calls.argument) if isinstance(step, str)]
    return (marks[0], marks[-1]) if marks else ()


_BLANKS = re.compile(r"\s*")
_LEAD_CHARS = 64
"""More characters than any mark has that an answer may begin with."""


class _Marks:
    """Finds the first of some marks in a text."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self._marks = marks
        self._pattern = re.compile("|".join(map(re.escape, marks))) if marks else None

    def first(self, text: str, at: int) -> tuple[int, str]:
        """Where the first mark is from ``at`` on, and which; or where one may begin that goes on
        behind the text, and an empty one."""
        found = None if self._pattern is None else self._pattern.search(text, at)
        if found is not None:
            return found.start(), found[0]
        return len(text) - max((_begun(text, at, mark) for mark in self._marks), default=0), ""


def _begun(text: str, at: int, mark: str) -> int:
    """Number of characters at the end of ``text``, from ``at`` on, that ``mark`` begins with."""
    sizes = range(min(len(mark) - 1, len(text) - at), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


def _joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """The same parts, with texts joined that follow each other, and thoughts."""
    found: list[AnswerPart] = []
    texts: list[str] = []

    def end() -> None:
        if texts:
            text = "".join(texts)
            found[-1] = Thought(text=text) if isinstance(found[-1], Thought) else text
            texts.clear()

    for part in parts:
        text = part.text if isinstance(part, Thought) else part
        if not isinstance(text, str):
            end()
            found.append(part)
        elif text or isinstance(part, Thought):
            if not texts or not isinstance(found[-1], type(part)):
                end()
                found.append(part)
            texts.append(text)
    end()
    return found
