"""``anabranch models`` fits a terminal of 80 columns."""

from dataclasses import replace

from client.models import table
from coordinator.plans.catalogue.served import ServedModel
from tests.unit.records import MODEL


def test_the_table_fits_a_terminal_and_names_what_capacity_is() -> None:
    spec = replace(MODEL, name="org/a-model-with-a-long-name-235B-A22B")
    holders = (3,) * spec.layers
    served = ServedModel(
        spec=spec,
        precisions=("bfloat16",),
        peers=12,
        holders=holders,
        coming=holders,
        relieved=tuple(map(float, holders)),
        tokens_per_s=957.2,
        kv_tokens_free=1_048_576,
        kv_tokens_wanted=20,
    )
    lines = table([served], "lab").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith(f"{spec.name}, fingerprint {spec.fingerprint[:16]}")
    assert lines[2].split()[:2] == ["yes:", str(spec.layers)]
    assert {"12", "957", "1048576", "20", "bfloat16"} <= set(lines[2].split())
    assert "At most: tokens/s, all users together, of the least served layer's holders." in lines
