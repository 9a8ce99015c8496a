"""A failed upload must leave nothing on the service, because it would cost money there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from servers import BUCKET, KEY, SECRET, Server

from deltawire.errors import StoreError
from deltawire.store import StoreOptions


@pytest.fixture
def client(moto: Server) -> Iterator[Any]:
    botocore = pytest.importorskip("botocore.session")
    credentials = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    client = botocore.get_session().create_client("s3", endpoint_url=moto.environment["AWS_ENDPOINT_URL"], **credentials)
    yield client
    client.close()


def test_an_upload_that_fails_half_way_is_aborted(moto: Server, client: Any) -> None:
    def pieces() -> Iterator[bytes]:
        yield bytes(12 << 20)
        raise KeyError("the source failed")

    with moto.open(options=StoreOptions(multipart_bytes=5 << 20, retries=0)) as store:
        with pytest.raises(KeyError):
            store.put("object", pieces())
        with pytest.raises(StoreError):
            store.put("object", iter([bytes(12 << 20)]), size=1)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET)


def test_a_large_object_really_goes_in_parts(moto: Server, client: Any) -> None:
    url = moto.fresh_url()
    with moto.open(url, StoreOptions(multipart_bytes=5 << 20)) as store:
        store.put("object", bytes(12 << 20))
    tag = client.head_object(Bucket=BUCKET, Key=f"{url.rsplit('/', 1)[1]}/object")["ETag"]
    assert tag.strip('"').endswith("-3")


def test_wrong_credentials_are_denied(seaweedfs: Server) -> None:
    wrong = Server(seaweedfs.name, "s3", {**seaweedfs.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}, seaweedfs.log)
    with wrong.open() as store, pytest.raises(StoreError) as raised:
        store.put_if_absent("object", b"x")
    assert type(raised.value).__name__ == "StoreDenied"
    assert SECRET not in str(raised.value)
