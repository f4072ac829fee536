"""What `launched` in conftest.py has a launcher start: it writes down the environment that it finds."""

import json
import os
import sys
from pathlib import Path

Path(sys.argv[1], os.environ.get("RANK", "0")).write_text(json.dumps(dict(os.environ)))
