"""What a caller is told of the peers that hold what it waits for."""

from client.view.view import SwarmView, ViewConfig
from dht.messages.session import RefusalCode
from tests.unit.records import record_of


def test_each_holder_of_what_is_missing_is_named_with_its_reason() -> None:
    silent: set[str] = set()
    view = SwarmView(ViewConfig(avoid_s=60.0), is_silent=silent.__contains__)
    records = [
        record_of("a", 0, 4, name="Ada"),
        record_of("b", 4, 8, name="Bo"),
        record_of("c", 4, 8, name="Cleo"),
        record_of("d", 4, 8, name="Dmitri"),
        record_of("e", name="Edda"),
    ]
    view.take_nodes({record.peer_id: record for record in records})
    view.avoid("a", None, 0.0, 1.0, reason="ended the stream")
    view.avoid("b", RefusalCode.BAD_REQUEST, 0.0, 1.0, reason="nobody takes such a request")
    silent.add("c")
    missing = ((4, 8),)
    lines = ("Bo: nobody takes such a request", "Cleo does not answer")
    assert view.passed_over(missing, 2.0) == lines
    assert view.passed_over((), 2.0) == ("Ada: ended the stream", *lines)
    assert view.passed_over(((8, 9),), 2.0) == ()
    assert view.passed_over(missing, 100.0) == lines[1:], "it may be asked again"
