#!/usr/bin/env python3
"""Health check of the images, /usr/local/bin/ready: exit code 0 when the process in the container says it is ready.

`ready [URL]`; what /readyz answers is printed, so that `docker inspect` shows which component is not. Standard library
only: it runs every few seconds.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4


def main(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 (the URL is in docker-compose.yml)
            print(answer.read().decode())
            return 0
    except urllib.error.HTTPError as error:
        print(error.read().decode(), file=sys.stderr)
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    own = f"http://127.0.0.1:{os.environ.get('PACELINE_HEALTH_PORT', '8081')}/readyz"
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else own))
