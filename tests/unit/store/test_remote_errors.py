"""Every fault of services and networks becomes the right error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from failing_server import Answer, failing_server
from servers import S3_CREDENTIALS, free_port

from deltawire.errors import (
    DataDamaged,
    DeltawireError,
    ObjectExists,
    ObjectMissing,
    OutcomeUnknown,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)
from deltawire.store import Store, StoreOptions, open_store
from deltawire.store.retry import Retry

RETRIES = 2

VERBS = {"get": "reading", "head": "looking up", "read": "reading", "put": "writing", "list": "listing", "delete": "deleting"}
OPERATIONS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("some/key", limit=100),
    "head": lambda store: store.head("some/key"),
    "read": lambda store: store.read_into("some/key", memoryview(bytearray(100))),
    "put": lambda store: store.put("some/key", b"data"),
    "put in parts": lambda store: store.put("some/key", bytes(6 << 20)),
    "list": lambda store: list(store.list("some/")),
    "delete": lambda store: store.delete(["some/key", "other/key"]),
}


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltawire.store.remote.Retry", functools.partial(Retry, sleep=lambda _: None))


SHORT = 1.5
"""The time-out in seconds of requests to a server that hangs. Other tests have a time-out that they never reach."""


def _open(endpoint: str, timeout: float = 120) -> Store:
    return open_store(
        "s3://bucket/prefix", options=StoreOptions(endpoint=endpoint, retries=RETRIES, timeout=timeout, multipart_bytes=5 << 20)
    )


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (400, StoreError),
        (401, StoreDenied),
        (403, StoreDenied),
        ((403, "QuotaExceeded"), StoreFull),
        (429, StoreUnavailable),
        (500, StoreUnavailable),
        (503, StoreUnavailable),
        (507, StoreFull),
        ("drop", StoreUnavailable),
    ],
)
def test_failures_of_repeatable_operations(operation: str, answer: Answer, expected: type[DeltawireError]) -> None:
    if operation == "head" and answer == (403, "QuotaExceeded"):
        pytest.skip("an answer to HEAD has no body to name a code in")
    with failing_server(answer) as server, _open(server.endpoint) as store:
        with pytest.raises(expected) as raised:
            OPERATIONS[operation](store)
        assert type(raised.value) is expected
        verb = str(raised.value).split(" 'some/")[0]
        assert verb == VERBS[operation.split()[0]]
        assert "s3://bucket/prefix" in str(raised.value)
        assert raised.value.__cause__ is None
        if operation != "put in parts":  # the library also repeats multipart requests
            assert len(server.requests) == (1 + RETRIES if expected is StoreUnavailable else 1)


@pytest.mark.parametrize(
    ("answer", "expected", "requests"),
    [
        (412, ObjectExists, 1),
        ((409, "BlobAlreadyExists"), ObjectExists, 1),
        ((409, "ConditionalRequestConflict"), OutcomeUnknown, 1),
        (408, OutcomeUnknown, 1),
        (500, OutcomeUnknown, 1),
        (503, OutcomeUnknown, 1),
        ("drop", OutcomeUnknown, 1),
        (429, StoreUnavailable, 1 + RETRIES),
        (401, StoreDenied, 1),
        (403, StoreDenied, 1),
        (404, StoreError, 1),
        (400, StoreError, 1),
        (501, StoreUnsuitable, 1),
        (507, StoreFull, 1),
    ],
)
def test_creation_is_never_repeated_when_it_may_have_happened(answer: Answer, expected: type[DeltawireError], requests: int) -> None:
    with failing_server(answer) as server, _open(server.endpoint) as store:
        with pytest.raises(expected) as raised:
            store.put_if_absent("some/key", b"data")
        assert type(raised.value) is expected
        assert len(server.requests) == requests


def test_a_creation_without_an_answer_in_time_is_of_unknown_outcome() -> None:
    with failing_server("hang") as server, _open(server.endpoint, timeout=SHORT) as store:
        with pytest.raises(OutcomeUnknown):
            store.put_if_absent("some/key", b"data")
        server.wait_for_requests(1)
    assert len(server.requests) == 1


def test_silence_is_repeated_and_then_unavailable() -> None:
    """The test runs all operations at the same time, because each waits for most of its time."""

    def silent(operation: str) -> int:
        with failing_server("hang") as server, _open(server.endpoint, timeout=SHORT) as store:
            with pytest.raises(StoreUnavailable):
                OPERATIONS[operation](store)
            server.wait_for_requests(1 + RETRIES)
        return len(server.requests)

    operations = ["get", "head", "read", "list", "delete"]
    with ThreadPoolExecutor(len(operations)) as pool:
        assert list(pool.map(silent, operations)) == [1 + RETRIES] * len(operations)


@pytest.mark.parametrize("operation", [*OPERATIONS, "create"])
def test_a_port_without_a_server_is_unavailable(operation: str) -> None:
    """This also holds for a creation, because its request was certainly not sent."""
    with _open(f"http://127.0.0.1:{free_port()}") as store, pytest.raises(StoreUnavailable):
        OPERATIONS.get(operation, lambda store: store.put_if_absent("some/key", b""))(store)


def test_missing_objects_and_missing_buckets_differ() -> None:
    with failing_server((404, "NoSuchKey")) as server, _open(server.endpoint) as store:
        for operation in ("get", "head", "read"):
            with pytest.raises(ObjectMissing):
                OPERATIONS[operation](store)
    with failing_server((404, "NoSuchBucket")) as server, _open(server.endpoint) as store:
        for operation in ("get", "read", "put", "put in parts", "list", "delete"):
            with pytest.raises(StoreError, match="bucket") as raised:
                OPERATIONS[operation](store)
            assert type(raised.value) is StoreError


def test_a_range_past_the_end_is_damage() -> None:
    with failing_server(416) as server, _open(server.endpoint) as store, pytest.raises(DataDamaged):
        OPERATIONS["read"](store)


def test_a_body_that_breaks_off_is_read_again() -> None:
    with failing_server("short") as server, _open(server.endpoint) as store:
        with pytest.raises(StoreUnavailable):
            OPERATIONS["get"](store)
        assert len(server.requests) == 1 + RETRIES


def test_an_answer_with_another_range_is_damage() -> None:
    """The first answer breaks off after three bytes. The second one begins at the first byte again, although the fourth was asked for."""
    with failing_server("short") as server, _open(server.endpoint) as store:
        with pytest.raises(DataDamaged, match="another range"):
            OPERATIONS["read"](store)
        assert len(server.requests) == 2


def test_a_body_that_does_not_end_is_damage_and_not_taken_into_memory() -> None:
    with failing_server("long") as server, _open(server.endpoint) as store:
        with pytest.raises(DataDamaged, match="sent more than"):
            OPERATIONS["read"](store)
        assert server.hung_up.wait(60)  # the server could not send the whole body


def test_an_operation_succeeds_once_the_service_is_back() -> None:
    with failing_server(503, "drop", 200) as server, _open(server.endpoint) as store:
        assert store.get("some/key", limit=100).startswith(b"<Error>")
        assert len(server.requests) == 3


def test_plain_http_is_for_loopback_unless_one_insists() -> None:
    with pytest.raises(StoreError, match="plain http"):
        open_store("s3://bucket", options=StoreOptions(endpoint="http://192.0.2.1:9000"))
    open_store("s3://bucket", options=StoreOptions(endpoint="http://192.0.2.1:9000", allow_http=True)).close()


@pytest.mark.parametrize("endpoint", ["host", "host:9000", "https://", "https://host:x", "https://host:99999", "ftp://host", "http://a b"])
@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket", "az://container", "hf://buckets/owner/name"])
def test_an_endpoint_that_is_no_address_is_refused_before_it_is_used(endpoint: str, url: str) -> None:
    with pytest.raises(StoreError, match="not an address"):
        open_store(url, options=StoreOptions(endpoint=endpoint))


def test_a_region_that_cannot_stand_in_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "us east 1")
    with pytest.raises(StoreError, match="AWS_REGION"):
        open_store("s3://bucket")


def test_a_server_that_does_not_answer_is_named_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    for name, value in S3_CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    options = StoreOptions(endpoint=f"http://user:hunter2@{address}/", retries=0)
    with open_store("s3://bucket/run", options=options) as store:
        for attempt in (lambda: store.get("key", limit=9), lambda: store.put_if_absent("key", b""), lambda: store.delete(["key"])):
            with pytest.raises(StoreUnavailable, match=f"the server at http://{address} .* AWS_ENDPOINT_URL") as raised:
                attempt()
            assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        ("az://container", {}),
        ("az://container", {"AZURE_STORAGE_ACCOUNT_NAME": "name", "AZURE_STORAGE_ACCOUNT_KEY": "no key, but hunter2"}),
        ("gs://bucket", {"GOOGLE_APPLICATION_CREDENTIALS": "/nowhere/to/be/found.json"}),
        ("gs://bucket", {"GOOGLE_SERVICE_ACCOUNT_KEY": '{"hunter2":'}),
    ],
)
def test_unusable_credentials_are_reported_when_the_store_is_opened(
    url: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_USE_EMULATOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreDenied, match=f"{url} cannot be opened") as raised:
        open_store(url)
    assert "\n" not in str(raised.value)
    assert "hunter2" not in str(raised.value)
    assert raised.value.__cause__ is None


UNSIGNED = '{"gcs_base_url":"https://unused","disable_oauth":true,"client_email":"","private_key":"","private_key_id":""}'


@pytest.mark.parametrize(
    ("url", "path", "condition"),
    [
        ("s3://bucket/prefix", "/bucket/prefix/some/key", ("if-none-match", "*")),
        ("hf://buckets/owner/name/prefix", "/owner/name/prefix/some/key", ("if-none-match", "*")),
        ("gs://bucket/prefix", "/bucket/prefix%2Fsome%2Fkey", ("x-goog-if-generation-match", "0")),
        ("az://container/prefix", "/container/prefix/some/key", ("if-none-match", "*")),
    ],
)
def test_every_service_is_asked_to_create_only_what_is_absent(
    url: str, path: str, condition: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", UNSIGNED)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "name")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    with failing_server(200, 412) as server, open_store(url, options=StoreOptions(endpoint=server.endpoint, retries=0)) as store:
        store.put_if_absent("some/key", b"data")
        with pytest.raises(ObjectExists):
            store.put_if_absent("some/key", b"data")
        assert server.requests == ["PUT", "PUT"]
        assert server.paths == [path, path]
        assert [headers.get(condition[0]) for headers in server.headers] == [condition[1]] * 2


def test_a_hugging_face_bucket_is_asked_for_under_its_owner() -> None:
    with failing_server(200) as server:
        with open_store("hf://buckets/owner/name/prefix", options=StoreOptions(endpoint=server.endpoint)) as store:
            store.get("some/key", limit=100)
        assert server.paths == ["/owner/name/prefix/some/key"]


@pytest.mark.parametrize("operation", ["get", "read", "put", "list"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_on_this_machine_is_never_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch, host: str, operation: str) -> None:
    with failing_server(503) as proxy, failing_server(403) as server:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.endpoint)
            monkeypatch.setenv(name.upper(), proxy.endpoint)
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with _open(server.endpoint.replace("127.0.0.1", host)) as store, pytest.raises(StoreDenied):
            OPERATIONS[operation](store)
        assert server.requests
        assert not proxy.requests
