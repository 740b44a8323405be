"""Write the demo's examples into the bucket of docker-compose.yml's store."""

import tempfile
import time
from pathlib import Path
from typing import Any

import botocore.session
from botocore.exceptions import BotoCoreError, ClientError

from shardgate import demo

BUCKET = "demo"
TRIES = 60


def main() -> None:
    """Wait for the bucket, then put every file."""
    client: Any = botocore.session.get_session().create_client("s3")
    wait_for_bucket(client)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo.write(folder, f"s3://{BUCKET}/{demo.FIELD}")
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            key = file.relative_to(folder).as_posix()
            client.put_object(Bucket=BUCKET, Key=key, Body=file.read_bytes())


def wait_for_bucket(client: Any) -> None:
    """Return when the store answers for the bucket."""
    for attempt in range(1, TRIES + 1):
        try:
            client.head_bucket(Bucket=BUCKET)
        except (BotoCoreError, ClientError):
            if attempt == TRIES:
                raise
            time.sleep(1)
        else:
            return


if __name__ == "__main__":
    main()
