"""A process without the daemon's libraries that imports the rest once, and is copied for each run.

It reads lines of JSON: the words behind ``python -m``, and the files for what the copy says. It
writes a line with the copy's process id, and one with its exit code.
"""

import gc
import importlib
import json
import os
import runpy
import sys

MODULES = (
    *("trio", "libp2p", "multiaddr", "dht.light.transport"),
    *("client.generate", "client.swarm.swarm", "client.text.conversation"),
    *("node.join", "node.sessions.session_table", "tests.sim.wrong_ways"),
)


def main() -> None:
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        words, out, error = json.loads(line)
        copy = os.fork()
        if not copy:
            for number, path in enumerate((os.devnull, out, error)):
                os.dup2(os.open(path, os.O_RDWR), number)
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            return
        print(copy, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
