"""``python -m recbole_pos ...`` is ``recbole-pos ...``."""

import sys

from recbole_pos.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
