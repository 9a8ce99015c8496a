"""Clients for each service: where its endpoint and credentials come from, and how patient each client is.

Imports obstore, so is itself imported only when a remote store is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from obstore.store import AzureStore, GCSStore, S3Store

from ..errors import StoreDenied, StoreError
from .base import StoreOptions
from .remote import Clients, RemoteStore
from .remote_errors import CLIENT_ERRORS, first_sentence

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, ObjectStore, RetryConfig, S3Config

_SLOWEST = 256 * 1024  # bytes per second that a line must carry for an upload not to be given up
_LONGEST_DOWNLOAD = timedelta(hours=6)  # silence ends a download long before; this only keeps the library's own 30 s away
_REGION = re.compile(r"[A-Za-z0-9-]{1,63}")
_HUGGING_FACE = "https://s3.hf.co"


def s3_store(bucket: str, prefix: str, options: StoreOptions) -> RemoteStore:
    """A bucket of S3, or of whatever speaks its language at `options.endpoint`, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.

    Credentials come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, a web identity, or the role of the container or
    machine; AWS configuration files are not read.
    """
    return _s3(
        bucket,
        prefix,
        f"s3://{bucket}",
        options,
        options.endpoint or _environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    )


def hugging_face_store(owner: str, name: str, prefix: str, options: StoreOptions) -> RemoteStore:
    """A Hugging Face bucket through its S3 gateway.

    As Hugging Face documents it (hub/storage-buckets-s3): endpoint https://s3.hf.co/OWNER, region us-east-1, the bucket in the path; an
    access key (HFAK…) and its secret are made from a user access token in the Hub's settings, and are given here as AWS_ACCESS_KEY_ID and
    AWS_SECRET_ACCESS_KEY. `options.endpoint` replaces https://s3.hf.co. Never tried against the real service;
    whether it honours create-if-absent is not known here, so it is `probe` that decides whether a chain can live there.
    """
    endpoint = f"{(options.endpoint or _HUGGING_FACE).rstrip('/')}/{owner}"
    return _s3(name, prefix, f"hf://buckets/{owner}/{name}", options, endpoint, region="us-east-1")


def gcs_store(bucket: str, prefix: str, options: StoreOptions) -> RemoteStore:
    """A bucket of Google Cloud Storage. Credentials come from GOOGLE_* variables, application-default credentials, or the machine's."""
    config: GCSConfig = {}
    if options.endpoint:
        config["base_url"] = options.endpoint

    def client(patience: ClientConfig, retry: RetryConfig) -> ObjectStore:
        return GCSStore(bucket, config=config, client_options=patience, retry_config=retry)

    return _remote(client, f"gs://{bucket}", prefix, options, options.endpoint)


def azure_store(container: str, prefix: str, options: StoreOptions) -> RemoteStore:
    """A container of Azure Blob Storage. Account and credentials come from AZURE_STORAGE_* variables; with AZURE_STORAGE_USE_EMULATOR
    from the emulator's well-known ones, at AZURITE_BLOB_STORAGE_URL."""
    config: AzureConfig = {}
    endpoint = options.endpoint or _environment("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURITE_BLOB_STORAGE_URL")
    if options.endpoint:
        config["endpoint"] = options.endpoint

    def client(patience: ClientConfig, retry: RetryConfig) -> ObjectStore:
        return AzureStore(container, config=config, client_options=patience, retry_config=retry)

    return _remote(client, f"az://{container}", prefix, options, endpoint)


def _s3(bucket: str, prefix: str, url: str, options: StoreOptions, endpoint: str | None, region: str | None = None) -> RemoteStore:
    config: S3Config = {}
    if endpoint:
        config["endpoint"] = endpoint
    region = options.region or region or _environment("AWS_REGION", "AWS_DEFAULT_REGION")
    if region:
        if not _REGION.fullmatch(region):  # it becomes part of a host's name, over which the client library would panic
            raise StoreError(f"{region!r} is no region. Look at AWS_REGION.")
        config["region"] = region
    if options.virtual_hosted is not None:
        config["virtual_hosted_style_request"] = options.virtual_hosted

    def client(patience: ClientConfig, retry: RetryConfig) -> ObjectStore:
        return S3Store(bucket, config=config, client_options=patience, retry_config=retry)

    return _remote(client, url, prefix, options, endpoint)


def _remote(
    client: Callable[[ClientConfig, RetryConfig], ObjectStore], url: str, prefix: str, options: StoreOptions, endpoint: str | None
) -> RemoteStore:
    common: ClientConfig = {"allow_http": _plain_http(endpoint, options), **_without_proxy(endpoint)}
    timeout = timedelta(seconds=options.timeout)
    upload = timedelta(seconds=options.timeout + options.streams * options.multipart_bytes / _SLOWEST)
    once: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}
    parts: RetryConfig = {"max_retries": options.retries, "retry_timeout": upload * (options.retries + 1)}
    place = f"{url}/{prefix}" if prefix else url
    try:
        clients = Clients(
            small=client({**common, "timeout": timeout}, once),
            download=client({**common, "timeout": _LONGEST_DOWNLOAD, "read_timeout": timeout}, once),
            upload=client({**common, "timeout": upload}, once),
            multipart=client({**common, "timeout": upload}, parts),
        )
    except CLIENT_ERRORS as error:
        # No account, a key or a file of keys that cannot be read: without the cause, whose text may hold parts of them.
        raise StoreDenied(f"{place} cannot be opened: {first_sentence(error)}") from None
    return RemoteStore(clients, url=place, prefix=prefix, options=options, endpoint=_shown(endpoint))


def _plain_http(endpoint: str | None, options: StoreOptions) -> bool:
    """Whether to speak without encryption: on this machine, or where the user insists. `StoreError` for what is no address."""
    if endpoint is None:
        return False
    scheme, host = _scheme_and_host(endpoint)
    if scheme == "https":
        return False
    if options.allow_http or os.environ.get("AWS_ALLOW_HTTP", "").lower() in {"1", "true"} or _is_loopback(host):
        return True
    raise StoreError(
        f"the endpoint at {host!r} is plain http. Use https; or, on a network that you trust, StoreOptions(allow_http=True) "
        "or AWS_ALLOW_HTTP=1."
    )


def _without_proxy(endpoint: str | None) -> ClientConfig:
    """Settings that keep requests to this machine from the proxies that `http_proxy` and its relatives name.

    The client library has no setting to ignore them. A proxy of one's own replaces them, and need not be used for any host.
    """
    if endpoint is None or not _is_loopback(host := _scheme_and_host(endpoint)[1]):
        return {}
    return {"proxy_url": endpoint, "proxy_excludes": host}


def _shown(endpoint: str | None) -> str:
    """The address of a server as messages may show it: without a user, a password or a path. Empty if there is none."""
    parts = urlsplit(endpoint or "")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""


def _scheme_and_host(endpoint: str) -> tuple[str, str]:
    """Checked here, since the client library panics over some of what is no address."""
    try:
        parts = urlsplit(endpoint)
        scheme, host, _ = parts.scheme.lower(), parts.hostname, parts.port
    except ValueError:
        scheme, host = "", None
    if scheme not in {"http", "https"} or not host or not endpoint.isascii() or any(character <= " " for character in endpoint):
        raise StoreError("the endpoint that the options or the environment name is no address. Write it as https://HOST[:PORT].")
    return scheme, host


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _environment(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)
