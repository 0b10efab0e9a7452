"""Runs one law of tests/fuzz for a while on inputs that libFuzzer picks by the code they reach.

``python -m tests.fuzz.guided FILE LAW SECONDS [CASE]``, with the extra ``fuzz`` installed; a law's
``CASE`` is the value of its parameter. An input that breaks the law is kept as ``crash-…`` in the
temporary directory, and ``LAW(Choices(its bytes))`` repeats it.
"""

import importlib
import sys
import tempfile

import atheris


def main(file: str, law: str, seconds: str, case: str | None = None) -> None:
    with atheris.instrument_imports(include=["client", "coordinator", "dht", "node"]):
        module = importlib.import_module(f"tests.fuzz.{file}")
    from tests.choices import Choices

    tried = getattr(module, law).hypothesis.inner_test
    names = tried.__code__.co_varnames[: tried.__code__.co_argcount]

    def one(data: bytes) -> None:
        if data:
            given = {names[-1]: Choices(data)} | ({names[0]: case} if case is not None else {})
            tried(**given)

    options = [f"-max_total_time={seconds}", f"-artifact_prefix={tempfile.gettempdir()}/"]
    atheris.Setup([sys.argv[0], *options, "-max_len=1500", "-len_control=0"], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
