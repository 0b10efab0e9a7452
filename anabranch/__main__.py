"""``python -m anabranch COMMAND``."""

import sys

from anabranch.commands import main

if __name__ == "__main__":
    sys.exit(main())
