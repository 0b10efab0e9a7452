"""The codec: golden bytes of this version, laws over generated values, framing."""

import asyncio
import contextlib
import math
import struct
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.errors import NetworkError, PeerError
from dht.messages import codec
from dht.messages.peer import (
    LayerCheck,
    LayerRows,
    ReachAnswer,
    ReachRequest,
    RecordsBusy,
    RecordsFound,
    RecordsRequest,
    RecordStore,
    RecordStored,
    SignedRecord,
    TextFile,
    TextPiece,
    TextRequest,
    TextsFound,
    TextsRequest,
)
from dht.messages.session import (
    SESSION_BOUNDS,
    ActivationItem,
    Activations,
    Delivered,
    FeaturedActivations,
    FinishReason,
    FramePart,
    Ping,
    Prompt,
    PromptScores,
    RefusalCode,
    RingToken,
    RingTokens,
    Sampling,
    SessionClose,
    SessionOpen,
    SessionRefused,
    Tokens,
)
from dht.messages.types import (
    PLAN_EDGES_MAX,
    RECORD_BOUNDS,
    Assignment,
    DeviceSpec,
    FlowEdge,
    LeaseRecord,
    Link,
    LinksRecord,
    ModelRecord,
    ModelSpec,
    NodeRecord,
    NodeState,
    Plan,
    PlanHead,
    PlanVersion,
    RouteStage,
    UplinkClaim,
)

S = "session-1"
MODEL = ModelSpec(
    name="m",
    root="r",
    layers=2,
    layer_bytes=3,
    layer_sizes=(2, 3),
    layer_kinds=b"\x01\x00",
    embed_bytes=4,
    head_bytes=5,
    kv_bytes_per_token_layer=6,
    activation_bytes=7,
    context_tokens=8,
    vocab=9,
)
# What this version looks like on the wire. A change here breaks every peer that runs today.
GOLDEN: list[tuple[Any, str]] = [
    (
        TextsRequest(root="a" * 64),
        "9304ad74657874732d7265717565737481a4726f6f74d9406161616161616161616161616161616161616161"
        "6161616161616161616161616161616161616161616161616161616161616161616161616161616161616161",
    ),
    (
        TextsFound(
            files=(TextFile(name="tokenizer.json", size_bytes=9, sha256="b" * 64),),
            weights="c" * 64,
        ),
        "9304ab74657874732d666f756e6482a566696c65739183a46e616d65ae746f6b656e697a65722e6a736f6eaa"
        "73697a655f627974657309a6736861323536d940626262626262626262626262626262626262626262626262"
        "62626262626262626262626262626262626262626262626262626262626262626262626262626262a7776569"
        "67687473d9406363636363636363636363636363636363636363636363636363636363636363636363636363"
        "6363636363636363636363636363636363636363636363636363",
    ),
    (
        TextRequest(sha256="b" * 64, start=262_144),
        "9304ac746578742d7265717565737482a6736861323536d94062626262626262626262626262626262626262"
        "6262626262626262626262626262626262626262626262626262626262626262626262626262626262626262"
        "62a57374617274ce00040000",
    ),
    (TextPiece(start=262_144), "9304aa746578742d706965636581a57374617274ce00040000"),
    (
        ModelRecord(
            peer_id="peer",
            model=MODEL,
            precision="int4 in bfloat16",
            start=0,
            end=2,
        ),
        "9304a56d6f64656c85a7706565725f6964a470656572a56d6f64656c8ca46e616d65a16da4726f6f74a172a6"
        "6c617965727302ab6c617965725f627974657303ab6c617965725f73697a6573920203ab6c617965725f6b69"
        "6e6473c4020100ab656d6265645f627974657304aa686561645f627974657305b86b765f62797465735f7065"
        "725f746f6b656e5f6c6179657206b061637469766174696f6e5f627974657307ae636f6e746578745f746f6b"
        "656e7308a5766f63616209a9707265636973696f6eb0696e743420696e2062666c6f61743136a57374617274"
        "00a3656e6402",
    ),
    (Ping(nonce=7), "9304a470696e6781a56e6f6e636507"),
    (
        RecordsRequest(keys=("n/m/nodes",), known=bytes(8)),
        "9304af7265636f7264732d7265717565737482a46b65797391a96e2f6d2f6e6f646573a56b6e6f776ec40800"
        "00000000000000",
    ),
    (
        RecordsFound(records=(b"ab",), more=True, unix_s=1.5),
        "9304ad7265636f7264732d666f756e6483a77265636f72647391c4026162a46d6f7265c3a6756e69785f73cb"
        "3ff8000000000000",
    ),
    (ReachRequest(port=31337), "9304ad72656163682d7265717565737481a4706f7274cd7a69"),
    (
        ReachAnswer(reached=None, host="::1"),
        "9304ac72656163682d616e7377657282a772656163686564c0a4686f7374a33a3a31",
    ),
    (
        LayerCheck(nonce=bytes(16), start=1, end=5),
        "9304ab6c617965722d636865636b83a56e6f6e6365c41000000000000000000000000000000000a573746172"
        "7401a3656e6405",
    ),
    (LayerRows(), "9304aa6c617965722d726f777380"),
    (
        RecordStore(record=b"ab"),
        "9304ac7265636f72642d73746f726582a67265636f7264c4026162a97265706c6963617465c3",
    ),
    (
        RecordStored(taken=False, reason="no"),
        "9304ad7265636f72642d73746f72656482a574616b656ec2a6726561736f6ea26e6f",
    ),
    (
        RecordsBusy(retry_after_s=1.0),
        "9304ac7265636f7264732d6275737981ad72657472795f61667465725f73cb3ff0000000000000",
    ),
    (
        SessionClose(session=S, attempt=3, tokens=17),
        "9304a5636c6f736583a773657373696f6ea973657373696f6e2d31a7617474656d707403a6746f6b656e7311",
    ),
    (
        SessionRefused(
            session=S,
            attempt=1,
            peer_id="peer",
            by="peer",
            code=RefusalCode.NO_KV,
            reason="full",
        ),
        "9304a77265667573656488a773657373696f6ea973657373696f6e2d31a7617474656d707401a7706565725f"
        "6964a470656572a26279a470656572a4636f6465a56e6f5f6b76a6726561736f6ea466756c6cad7265747279"
        "5f61667465725f73cb0000000000000000a97369676e6174757265c400",
    ),
    (
        NodeRecord(
            peer_id="peer",
            name="n",
            software_version="1",
            device=DeviceSpec(kind="cuda", name="T4", memory_bytes=16),
            model=MODEL,
            memory_bytes=10,
            kv_tokens_min=11,
            tokens_per_s=(1.5,),
            decode_layer_ns=((1, 1_400_000, 1_410_000), (256, 3_290_000, 5_070_000)),
            prompt_layer_ns=((32, 1_400_000, 1_400_000),),
            up_bytes_per_s=12.5,
            uplink=UplinkClaim(uplink="key", signature=b"sig", up_bytes_per_s=1.5),
            state=NodeState.WAITING,
        ),
        "9304a46e6f6465de0020a7706565725f6964a470656572a46e616d65a16eb0736f6674776172655f76657273"
        "696f6ea131a664657669636583a46b696e64a463756461a46e616d65a25434ac6d656d6f72795f6279746573"
        "10a56d6f64656c8ca46e616d65a16da4726f6f74a172a66c617965727302ab6c617965725f627974657303ab"
        "6c617965725f73697a6573920203ab6c617965725f6b696e6473c4020100ab656d6265645f627974657304aa"
        "686561645f627974657305b86b765f62797465735f7065725f746f6b656e5f6c6179657206b0616374697661"
        "74696f6e5f627974657307ae636f6e746578745f746f6b656e7308a5766f63616209ac6d656d6f72795f6279"
        "7465730aad6b765f746f6b656e735f6d696e0bac746f6b656e735f7065725f7391cb3ff8000000000000af64"
        "65636f64655f6c617965725f6e73929301ce00155cc0ce001583d093cd0100ce00323390ce004d5cb0af7072"
        "6f6d70745f6c617965725f6e73919320ce00155cc0ce00155cc0ae75705f62797465735f7065725f73cb4029"
        "000000000000b0646f776e5f62797465735f7065725f73c0a675706c696e6b83a675706c696e6ba36b6579a9"
        "7369676e6174757265c403736967ae75705f62797465735f7065725f73cb3ff8000000000000a97072656369"
        "73696f6ea0a57374617465a777616974696e67a5737461727400a3656e6400ac706c616e5f76657273696f6e"
        "83a47465726d00a7636f756e74657200a472616e6b00ae6b765f746f6b656e735f6672656500b06b765f746f"
        "6b656e735f77616e74656400a873657373696f6e7300a961646472657373657390ad6a6f696e65645f756e69"
        "785f73cb0000000000000000ac6d6f7665645f756e69785f73cb0000000000000000a7616e737765727300ad"
        "616e737765725f746f6b656e7300ac6c6f6164735f626573696465c2a56c69676874c2a57265616368a7756e"
        "6b6e6f776ea672656c617973c2a9666f726574656c6c73c2ae666561747572655f6c617965727390",
    ),
    (
        Prompt(session=S, attempt=0, position=0, token_ids=(1, 2, 300)),
        "9304a670726f6d707484a773657373696f6ea973657373696f6e2d31a7617474656d707400a8706f73697469"
        "6f6e00a9746f6b656e5f696473930102cd012c",
    ),
    (
        Activations(
            items=(
                ActivationItem(
                    session=S,
                    attempt=0,
                    position=5,
                    tokens=2,
                    drafts=(7,),
                    computed_s=0.5,
                    waited_s=0.25,
                ),
            ),
            dtype="bfloat16",
            hidden=64,
        ),
        "9304a46163747383a56974656d739187a773657373696f6ea973657373696f6e2d31a7617474656d707400a8"
        "706f736974696f6e05a6746f6b656e7302a66472616674739107aa636f6d70757465645f73cb3fe000000000"
        "0000a87761697465645f73cb3fd0000000000000a56474797065a862666c6f61743136a668696464656e40",
    ),
    (
        FeaturedActivations(
            items=(ActivationItem(session=S, attempt=0, position=5, tokens=2, drafts=(7,)),),
            dtype="bfloat16",
            hidden=64,
            features=(4,),
        ),
        "9304ad616374732d666561747572657384a56974656d739187a773657373696f6ea973657373696f6e2d31a7"
        "617474656d707400a8706f736974696f6e05a6746f6b656e7302a66472616674739107aa636f6d7075746564"
        "5f73cb0000000000000000a87761697465645f73cb0000000000000000a56474797065a862666c6f61743136"
        "a668696464656e40a866656174757265739104",
    ),
    (
        SessionOpen(
            session=S,
            attempt=1,
            client="me",
            fingerprint="f",
            route=(RouteStage(peer_id="peer", start=0, end=2),),
            hop=0,
            prompt_tokens=3,
            max_new_tokens=4,
            sampling=Sampling(),
            draft_tokens=3,
            feature_layers=(1,),
        ),
        "9304a46f70656ede0017a773657373696f6ea973657373696f6e2d31a7617474656d707401a6636c69656e74"
        "a26d65ab66696e6765727072696e74a166a5726f7574659183a7706565725f6964a470656572a57374617274"
        "00a3656e6402a3686f7000ad70726f6d70745f746f6b656e7303ae6d61785f6e65775f746f6b656e7304a873"
        "616d706c696e678eab74656d7065726174757265cb0000000000000000a5746f705f6b00a5746f705f70cb3f"
        "f0000000000000a47365656400ae73746f705f746f6b656e5f69647390a56d696e5f70cb0000000000000000"
        "b272657065746974696f6e5f70656e616c7479cb3ff0000000000000b070726573656e63655f70656e616c74"
        "79cb0000000000000000b16672657175656e63795f70656e616c7479cb0000000000000000aa6c6f6769745f"
        "6269617390ae6d696e5f6e65775f746f6b656e7300a86c6f6770726f6273c0af70726f6d70745f6c6f677072"
        "6f6273c0a76772616d6d6172c400a8616e73776572656400a7686973746f727990ad6d6967726174655f756e"
        "74696cc0ab73636f7265735f66726f6d01a87072696f72697479a66e6f726d616ca9636f70795f66726f6dc0"
        "ab726f77735f6c6f67676564c3ac64726166745f746f6b656e7303aa70726f6d70745f69647390a6626c6f63"
        "6b73c400ad7368617265735f707265666978c2ae666561747572655f6c61796572739101ae65787069726573"
        "5f756e69785f73cb0000000000000000a56772616e74c400",
    ),
    (
        RingTokens(tokens=(RingToken(session=S, attempt=0, position=5, token_ids=(7, 8)),)),
        "9304a472696e6781a6746f6b656e739185a773657373696f6ea973657373696f6e2d31a7617474656d707400"
        "a8706f736974696f6e05a9746f6b656e5f696473920708a8666f7265746f6c6490",
    ),
    (
        Tokens(
            session=S,
            attempt=0,
            position=9,
            token_ids=(4,),
            finish_reason=FinishReason.STOP,
            computed_s=0.5,
            waited_s=0.25,
        ),
        "9304a6746f6b656e7387a773657373696f6ea973657373696f6e2d31a7617474656d707400a8706f73697469"
        "6f6e09a9746f6b656e5f6964739104ad66696e6973685f726561736f6ea473746f70aa636f6d70757465645f"
        "73cb3fe0000000000000a87761697465645f73cb3fd0000000000000",
    ),
    (
        LeaseRecord(peer_id="peer", term=2, expires_unix_s=1.5),
        "9304a56c6561736583a7706565725f6964a470656572a47465726d02ae657870697265735f756e69785f73cb"
        "3ff8000000000000",
    ),
    (
        PlanHead(
            peer_id="peer",
            version=PlanVersion(term=1, counter=2, rank=3),
            sha256="0" * 64,
            size_bytes=10,
        ),
        "9304a9706c616e2d6865616485a7706565725f6964a470656572a776657273696f6e83a47465726d01a7636f"
        "756e74657202a472616e6b03a6736861323536d940" + "30" * 64 + "aa73697a655f62797465730a"
        "ab66657463685f627974657300",
    ),
    (
        SignedRecord(
            key="n/m/nodes",
            peer_id="peer",
            expires_unix_s=1.5,
            payload=b"p",
            signature=b"s" * 64,
            sequence=7,
        ),
        "9304a67369676e656486a36b6579a96e2f6d2f6e6f646573a7706565725f6964a470656572ae657870697265"
        "735f756e69785f73cb3ff8000000000000a77061796c6f6164c40170a97369676e6174757265c440"
        + "73" * 64
        + "a873657175656e636507",
    ),
    (
        FramePart(number=3, offset=4096, total_bytes=9000, slow=True),
        "9304a47061727484a66e756d62657203a66f6666736574cd1000ab746f74616c5f6279746573cd2328a4736c"
        "6f77c3",
    ),
    (
        Delivered(total_bytes=9000, slow_bytes=4096),
        "9304a964656c69766572656482ab746f74616c5f6279746573cd2328aa736c6f775f6279746573cd1000",
    ),
    (
        PromptScores(session=S, attempt=2, position=1, tokens=3),
        "9304ad70726f6d70742d73636f72657384a773657373696f6ea973657373696f6e2d31a7617474656d707402"
        "a8706f736974696f6e01a6746f6b656e7303",
    ),
    (
        SessionOpen(
            session=S,
            attempt=1,
            client="me",
            fingerprint="f",
            route=(RouteStage(peer_id="peer", start=0, end=2),),
            hop=0,
            prompt_tokens=3,
            max_new_tokens=4,
            sampling=Sampling(
                temperature=0.5,
                repetition_penalty=1.5,
                logit_bias=((5, -1.0),),
                min_new_tokens=2,
                logprobs=0,
                prompt_logprobs=1,
                grammar=b"g",
            ),
            answered=1,
            history=(7, 8, 9),
            blocks=b"n" * 16,
            shares_prefix=True,
        ),
        "9304a46f70656ede0016a773657373696f6ea973657373696f6e2d31a7617474656d707401a6636c69656e74"
        "a26d65ab66696e6765727072696e74a166a5726f7574659183a7706565725f6964a470656572a57374617274"
        "00a3656e6402a3686f7000ad70726f6d70745f746f6b656e7303ae6d61785f6e65775f746f6b656e7304a873"
        "616d706c696e678eab74656d7065726174757265cb3fe0000000000000a5746f705f6b00a5746f705f70cb3f"
        "f0000000000000a47365656400ae73746f705f746f6b656e5f69647390a56d696e5f70cb0000000000000000"
        "b272657065746974696f6e5f70656e616c7479cb3ff8000000000000b070726573656e63655f70656e616c74"
        "79cb0000000000000000b16672657175656e63795f70656e616c7479cb0000000000000000aa6c6f6769745f"
        "62696173919205cbbff0000000000000ae6d696e5f6e65775f746f6b656e7302a86c6f6770726f627300af70"
        "726f6d70745f6c6f6770726f627301a76772616d6d6172c40167a8616e73776572656401a7686973746f7279"
        "93070809ad6d6967726174655f756e74696cc0ab73636f7265735f66726f6d01a87072696f72697479a66e6f"
        "726d616ca9636f70795f66726f6dc0ab726f77735f6c6f67676564c3ac64726166745f746f6b656e7300aa70"
        "726f6d70745f69647390a6626c6f636b73c4106e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6ead7368617265735f70"
        "7265666978c3ae657870697265735f756e69785f73cb0000000000000000a56772616e74c400",
    ),
]

ids = st.text(min_size=8, max_size=32)
peer_ids = st.text(min_size=1, max_size=64)
VERSION = codec.WIRE_VERSION
attempts = st.integers(0, 1 << 20)
positions = st.integers(0, 1 << 22)
tokens = st.integers(0, 1 << 24)
rates = st.floats(0, 1e15)
seconds = st.floats(0, 1e10)
messages = st.one_of(
    st.builds(Ping, nonce=st.integers(0, 1 << 50)),
    st.builds(
        Prompt,
        session=ids,
        attempt=attempts,
        position=positions,
        token_ids=st.lists(tokens, min_size=1, max_size=50).map(tuple),
    ),
    st.builds(
        Tokens,
        session=ids,
        attempt=attempts,
        position=positions,
        token_ids=st.lists(tokens, max_size=50).map(tuple),
        finish_reason=st.none() | st.sampled_from(FinishReason),
    ),
    st.builds(
        RingTokens,
        tokens=st.lists(
            st.builds(
                RingToken,
                session=ids,
                attempt=attempts,
                position=positions,
                token_ids=st.lists(tokens, min_size=1, max_size=16).map(tuple),
                foretold=st.lists(tokens, max_size=15).map(tuple),
            ),
            min_size=1,
            max_size=8,
        ).map(tuple),
    ),
    st.builds(
        SessionRefused,
        session=ids,
        attempt=attempts,
        peer_id=peer_ids,
        by=peer_ids,
        code=st.sampled_from(RefusalCode),
        reason=st.text(max_size=512),
    ),
    st.builds(
        LinksRecord,
        peer_id=peer_ids,
        links=st.lists(
            st.builds(
                Link,
                source=peer_ids,
                target=peer_ids,
                bandwidth_bytes_per_s=rates,
                rtt_s=seconds,
                measured_unix_s=seconds,
            ),
            max_size=4,
        ).map(tuple),
    ),
    st.builds(
        SignedRecord,
        key=st.text(max_size=512),
        peer_id=peer_ids,
        expires_unix_s=seconds,
        payload=st.binary(max_size=4096),
        signature=st.binary(min_size=64, max_size=64),
        sequence=st.integers(0, (1 << 63) - 1),
    ),
)


framed = messages.filter(lambda each: not isinstance(each, LinksRecord | SignedRecord))


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=lambda v: type(v).__name__)
def test_this_version_stays_as_it_is(message: Any, golden: str) -> None:
    assert codec.encode(message).hex() == golden
    assert codec.decode(bytes.fromhex(golden)) == message


@pytest.mark.parametrize(
    "wrong",
    [
        {"decode_layer_ns": [[0, 1, 1]]},
        {"decode_layer_ns": [[1, -1, 1]]},
        {"decode_layer_ns": [[1, 1.5, 2]]},
        {"decode_layer_ns": [[1, 1, RECORD_BOUNDS.nanoseconds_max + 1]]},
        {"decode_layer_ns": [[1, 1]]},
        {"prompt_layer_ns": [[rows, 1, 1] for rows in range(1, RECORD_BOUNDS.layer_times_max + 2)]},
        {"up_bytes_per_s": -1.0},
        {"up_bytes_per_s": math.nan},
        {"down_bytes_per_s": math.inf},
        {"uplink": {"uplink": "", "signature": b""}},
        {"uplink": {"uplink": "k" * 65, "signature": b""}},
        {"uplink": {"uplink": "key", "signature": bytes(65)}},
        {"uplink": {"uplink": "key", "signature": b"", "up_bytes_per_s": -1.0}},
        {"uplink": {"uplink": "key", "signature": b"", "up_bytes_per_s": math.inf}},
        {"uplink": "key"},
    ],
    ids=str,
)
def test_figures_beyond_their_bounds_are_no_record(wrong: dict[str, Any]) -> None:
    record = next(message for message, _ in GOLDEN if isinstance(message, NodeRecord))
    version, kind, fields = msgspec.msgpack.decode(codec.encode(record))
    assert codec.decode(msgspec.msgpack.encode([version, kind, fields])) == record
    with pytest.raises(codec.MalformedError):
        codec.decode(msgspec.msgpack.encode([version, kind, fields | wrong]))


def test_a_frame_from_before_a_field_was_added_still_decodes() -> None:
    old = (
        "9304a77265667573656486a773657373696f6ea973657373696f6e2d31a7617474656d707401a7706565725f6964"
        "a470656572a26279a470656572a4636f6465a56e6f5f6b76a6726561736f6ea466756c6c"
    )
    refused = codec.decode(bytes.fromhex(old))
    assert (refused.reason, refused.retry_after_s) == ("full", 0.0)
    sampling = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "seed": 1, "stop_token_ids": [2]}
    data = msgspec.msgpack.encode(sampling)
    assert msgspec.msgpack.decode(data, type=Sampling) == Sampling(
        temperature=0.5, top_k=3, top_p=0.9, seed=1, stop_token_ids=(2,)
    )


def test_a_record_from_before_a_field_was_added_is_read() -> None:
    older = {"peer_id": "p", "version": {"term": 1}, "sha256": "0" * 64, "size_bytes": 1}
    head = codec.decode(msgspec.msgpack.encode((VERSION, "plan-head", older)))
    assert head == PlanHead(
        peer_id="p", version=PlanVersion(term=1), sha256="0" * 64, size_bytes=1, fetch_bytes=0
    )


def test_unknown_fields_are_ignored() -> None:
    data = msgspec.msgpack.encode((VERSION, "ping", {"nonce": 7, "added_later": [1, {"x": None}]}))
    assert codec.decode(data) == Ping(nonce=7)


@pytest.mark.parametrize(
    ("envelope", "reason"),
    [
        ((1, "ping", {"nonce": 7}), "wire version 1"),
        ((VERSION, "pingpong", {"nonce": 7}), "unknown message kind"),
        ((VERSION, "ping", {}), "not a message"),
        ((VERSION, "ping", {"nonce": -1}), "not a message"),
        ((VERSION, "ping", {"nonce": "7"}), "not a message"),
        ((VERSION, "ping"), "not a message"),
        ((VERSION, "close", {"session": "s" * 33, "attempt": 0}), "not a message"),
        ((VERSION, "close", {"session": S, "attempt": 0, "tokens": -1}), "not a message"),
        ((VERSION, "close", {"session": S, "attempt": 0, "tokens": 1 << 60}), "not a message"),
        (
            (
                VERSION,
                "prompt",
                {"session": S, "attempt": 0, "position": 0, "token_ids": []},
            ),
            "not a mess",
        ),
    ],
)
def test_what_is_refused(envelope: Any, reason: str) -> None:
    with pytest.raises(codec.MalformedError, match=reason) as caught:
        codec.decode(msgspec.msgpack.encode(envelope))
    assert isinstance(caught.value, PeerError)


MORE = SESSION_BOUNDS.draft_tokens_max + 1


@pytest.mark.parametrize(
    "message",
    [
        Activations(
            items=(
                ActivationItem(
                    session=S, attempt=0, position=5, tokens=MORE + 1, drafts=(7,) * MORE
                ),
            ),
            dtype="bfloat16",
            hidden=64,
        ),
        RingTokens(
            tokens=(RingToken(session=S, attempt=0, position=5, token_ids=(7,) * (MORE + 1)),)
        ),
        RingTokens(tokens=(RingToken(session=S, attempt=0, position=5, token_ids=()),)),
        RingTokens(
            tokens=(
                RingToken(session=S, attempt=0, position=5, token_ids=(7,), foretold=(7,) * MORE),
            )
        ),
    ],
)
def test_more_drafts_than_a_chunk_has_are_refused(message: Any) -> None:
    with pytest.raises(codec.MalformedError, match="length"):
        codec.decode(codec.encode(message))


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("open", {"feature_layers": [1, 2, 3, 4]}),
        ("open", {"feature_layers": []}),
        ("open", {"feature_layers": [-1]}),
        ("open", {"feature_layers": [1 << 20]}),
        ("open", {"feature_layers": None}),
        ("acts-features", {"features": [-1]}),
        ("acts-features", {"features": [(3 << 16) + 1]}),
        ("acts-features", {"features": []}),
        ("acts-features", {"features": [1] * 1025}),
    ],
)
def test_features_are_bounded(kind: str, changed: dict[str, Any]) -> None:
    sent = next(message for message, golden in GOLDEN if kind.encode().hex() in golden[:40])
    version, _, fields = msgspec.msgpack.decode(codec.encode(sent))
    assert codec.decode(msgspec.msgpack.encode([version, kind, fields])) == sent
    with pytest.raises(codec.MalformedError, match="not a message"):
        codec.decode(msgspec.msgpack.encode([version, kind, fields | changed]))


def test_size_and_type_are_checked() -> None:
    data = codec.encode(Ping(nonce=7))
    with pytest.raises(codec.MalformedError, match="the limit is 3"):
        codec.decode(data, limit_bytes=3)
    with pytest.raises(codec.MalformedError, match="expected LeaseRecord, got Ping"):
        codec.decode_as(LeaseRecord, data, limit_bytes=4096)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(codec.MalformedError):
        codec.decode(b"\x93\x01\xa4ping" + b"\x91" * 100_000 + b"\x00")
    deep = b"\x81\xa5other" + b"\x91" * 100_000 + b"\x00"
    with pytest.raises(codec.MalformedError):
        codec.decode(b"\x93\x01\xa4ping" + deep)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_malformed(data: bytes) -> None:
    with contextlib.suppress(codec.MalformedError):
        codec.decode(data)


@given(messages, st.data())
def test_damaged_messages_decode_or_are_malformed(message: Any, data: st.DataObject) -> None:
    encoded = bytearray(codec.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(codec.MalformedError):
        codec.decode(bytes(encoded))


@given(messages)
def test_messages_survive_the_wire(message: Any) -> None:
    assert codec.decode(codec.encode(message)) == message


class Bytes:
    """A byte stream of what was written; records the largest read."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = data
        self.largest = 0

    async def read_exactly(self, count: int) -> bytes:
        self.largest = max(self.largest, count)
        if count > len(self.data):
            raise NetworkError("ended")
        taken, self.data = self.data[:count], self.data[count:]
        return taken

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None:
        pass


@given(st.lists(st.tuples(framed, st.binary(max_size=1000)), max_size=4))
def test_frames_follow_one_another(frames: list[tuple[Any, bytes]]) -> None:
    async def body() -> None:
        stream = Bytes()
        for message, tensor in frames:
            await codec.send_frame(stream, message, tensor)
        for message, tensor in frames:
            frame = await codec.read_frame(stream)
            assert frame.message == message
            assert bytes(frame.body) == tensor
        with pytest.raises(NetworkError):
            await codec.read_frame(stream)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("total", "envelope"),
    [
        (codec.FRAME_BOUNDS.bytes_max + 1, 10),
        (0xFFFFFFFF, 10),
        (100, 0),
        (100, 97),
        (100, 0xFFFFFFFF),
        (0, 0),
        (3, 0),
        (4, 1),
    ],
)
def test_odd_lengths_are_refused_before_reading(total: int, envelope: int) -> None:
    stream = Bytes(struct.pack("<II", total, envelope) + bytes(200))
    with pytest.raises(codec.MalformedError):
        asyncio.run(codec.read_frame(stream))
    assert stream.largest == 8


def test_a_frame_over_the_limit_is_never_made() -> None:
    with pytest.raises(ValueError, match="the limit is"):
        codec.encode_frame(Ping(nonce=1), bytes(codec.FRAME_BOUNDS.bytes_max))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_frame_an_end_or_malformed(data: bytes) -> None:
    async def body() -> None:
        with contextlib.suppress(codec.MalformedError, NetworkError):
            await codec.read_frame(Bytes(data))

    asyncio.run(body())


def test_a_plan_of_the_most_peers_fits_and_a_head_cannot_promise_more() -> None:
    peers = [f"{at:052d}" for at in range(RECORD_BOUNDS.peers_max)]
    edges = tuple(
        FlowEdge(
            tail=peers[at % RECORD_BOUNDS.peers_max],
            head=peers[at // RECORD_BOUNDS.peers_max],
            tokens_per_s=1 / 3,
        )
        for at in range(PLAN_EDGES_MAX)
    )
    plan = Plan(
        version=PlanVersion(term=1),
        coordinator=peers[0],
        model=ModelSpec(
            name="m",
            root="f",
            layers=1000,
            layer_bytes=1,
            embed_bytes=1,
            head_bytes=1,
            kv_bytes_per_token_layer=1,
            activation_bytes=4,
            context_tokens=1024,
            vocab=2048,
        ),
        assignments=tuple(Assignment(peer_id=peer, start=300, end=400) for peer in peers),
        edges=edges,
        flow_tokens_per_s=1 / 3,
        bound_tokens_per_s=1 / 3,
        planner="helix",
        solve_s=1 / 3,
        created_unix_s=1e9 / 3,
        waves=tuple((peer,) for peer in peers),
    )
    body = codec.encode(plan)
    assert codec.decode_as(Plan, body, limit_bytes=RECORD_BOUNDS.plan_bytes_max) == plan
    head = PlanHead(
        peer_id="p",
        version=plan.version,
        sha256="0" * 64,
        size_bytes=RECORD_BOUNDS.plan_bytes_max + 1,
    )
    with pytest.raises(PeerError):
        codec.decode(codec.encode(head))
    within = replace(head, size_bytes=RECORD_BOUNDS.plan_bytes_max)
    assert codec.decode(codec.encode(within)) == within
