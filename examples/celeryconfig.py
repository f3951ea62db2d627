"""What the examples share: where the broker and the lock servers are."""

import os
from pathlib import Path

broker_url = os.environ.get("BROKER_URL", "redis://127.0.0.1:6379/0")
result_backend = broker_url
broker_connection_retry_on_startup = True

dflock_servers = os.environ.get("DFLOCK_SERVERS", "127.0.0.1:6388")
if "DFLOCK_AUTH_TOKEN_FILE" in os.environ:
    # A variable with the secret itself could be read by whoever can list a container's settings.
    dflock_auth_token = Path(os.environ["DFLOCK_AUTH_TOKEN_FILE"]).read_text().rstrip("\n")
