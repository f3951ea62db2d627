"""What the examples share: where the broker is, and the lock servers.

The plugin reads the secret of the lock servers by itself, where ``DFLOCK_AUTH_TOKEN_FILE`` says.
"""

import os

broker_url = os.environ.get("BROKER_URL", "redis://127.0.0.1:6379/0")
result_backend = broker_url
broker_connection_retry_on_startup = True

dflock_servers = os.environ.get("DFLOCK_SERVERS", "127.0.0.1:6388")
