"""Make clients for each service: where its endpoint and credentials come from, and how long each client waits.

This module imports obstore, so it is imported only when a remote store is opened.
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
from .base import MULTIPART_STREAMS, StoreOptions
from .remote import Clients, RemoteStore
from .remote_errors import CLIENT_ERRORS, first_sentence

if TYPE_CHECKING:
    from obstore.store import AzureConfig, ClientConfig, GCSConfig, ObjectStore, RetryConfig, S3Config

_SLOWEST = 256 * 1024  # an upload slower than this many bytes per second is given up
_LONGEST_DOWNLOAD = timedelta(hours=6)  # replaces the library's limit of 30 s; a download without progress ends much earlier
_IDLE = timedelta(minutes=15)  # connections stay open between versions, unless the service closes them; a new one begins slowly
_REGION = re.compile(r"[A-Za-z0-9-]{1,63}")
_HUGGING_FACE = "https://s3.hf.co"


def s3_store(bucket: str, prefix: str, options: StoreOptions) -> RemoteStore:
    """Return a store in an S3 bucket, or in a compatible service at `options.endpoint`, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.

    Credentials come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, a web identity, or the role of the container or
    machine. AWS configuration files are not read.
    """
    return _s3(
        bucket,
        prefix,
        f"s3://{bucket}",
        options,
        options.endpoint or _environment("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    )


def hugging_face_store(owner: str, name: str, prefix: str, options: StoreOptions) -> RemoteStore:
    """Return a store in a Hugging Face bucket, through its S3 gateway.

    Hugging Face documents it in hub/storage-buckets-s3: the endpoint is https://s3.hf.co/OWNER, the region us-east-1, and the bucket is in
    the path. An access key (HFAK…) and its secret are made from a user access token in the Hub's settings; pass them as AWS_ACCESS_KEY_ID
    and AWS_SECRET_ACCESS_KEY. `options.endpoint` replaces https://s3.hf.co. This was never tested against the real service. `probe` finds
    out whether the service supports create-if-absent.
    """
    endpoint = f"{(options.endpoint or _HUGGING_FACE).rstrip('/')}/{owner}"
    return _s3(name, prefix, f"hf://buckets/{owner}/{name}", options, endpoint, region="us-east-1")


def gcs_store(bucket: str, prefix: str, options: StoreOptions) -> RemoteStore:
    """Return a store in a Google Cloud Storage bucket. Credentials come from GOOGLE_* variables, application-default credentials, or the
    machine.
    """
    config: GCSConfig = {}
    if options.endpoint:
        config["base_url"] = options.endpoint

    def client(patience: ClientConfig, retry: RetryConfig) -> ObjectStore:
        return GCSStore(bucket, config=config, client_options=patience, retry_config=retry)

    return _remote(client, f"gs://{bucket}", prefix, options, options.endpoint)


def azure_store(container: str, prefix: str, options: StoreOptions) -> RemoteStore:
    """Return a store in an Azure Blob Storage container.

    Account and credentials come from AZURE_STORAGE_* variables. With AZURE_STORAGE_USE_EMULATOR they are the emulator's well-known ones, at
    AZURITE_BLOB_STORAGE_URL.
    """
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
        if not _REGION.fullmatch(region):  # it becomes part of a host name, and the client library panics on invalid ones
            raise StoreError(f"{region!r} is not a region. Look at AWS_REGION.")
        config["region"] = region
    if options.virtual_hosted is not None:
        config["virtual_hosted_style_request"] = options.virtual_hosted

    def client(patience: ClientConfig, retry: RetryConfig) -> ObjectStore:
        return S3Store(bucket, config=config, client_options=patience, retry_config=retry)

    return _remote(client, url, prefix, options, endpoint)


def _remote(
    client: Callable[[ClientConfig, RetryConfig], ObjectStore], url: str, prefix: str, options: StoreOptions, endpoint: str | None
) -> RemoteStore:
    common: ClientConfig = {"pool_idle_timeout": _IDLE, "allow_http": _plain_http(endpoint, options), **_without_proxy(endpoint)}
    timeout = timedelta(seconds=options.timeout)
    upload = timedelta(seconds=options.timeout + MULTIPART_STREAMS * options.multipart_bytes / _SLOWEST)
    once: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(0)}
    parts: RetryConfig = {"max_retries": options.retries, "retry_timeout": upload * (options.retries + 1)}
    location = f"{url}/{prefix}" if prefix else url
    try:
        clients = Clients(
            small=client({**common, "timeout": timeout}, once),
            download=client({**common, "timeout": _LONGEST_DOWNLOAD, "read_timeout": timeout}, once),
            upload=client({**common, "timeout": upload}, once),
            multipart=client({**common, "timeout": upload}, parts),
        )
    except CLIENT_ERRORS as error:
        # The account is missing, or a key cannot be read. The cause is left out because its text may hold parts of keys.
        raise StoreDenied(f"{location} cannot be opened: {first_sentence(error)}") from None
    return RemoteStore(clients, url=location, prefix=prefix, options=options, endpoint=_shown(endpoint))


def _plain_http(endpoint: str | None, options: StoreOptions) -> bool:
    """Return whether to use no encryption: on this machine, or if the user insists. Raises `StoreError` for an invalid address."""
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

    The client library has no setting to ignore them. A configured proxy replaces them, and can be excluded for every host.
    """
    if endpoint is None or not _is_loopback(host := _scheme_and_host(endpoint)[1]):
        return {}
    return {"proxy_url": endpoint, "proxy_excludes": host}


def _shown(endpoint: str | None) -> str:
    """Return the address of a server for messages, without user, password and path. Returns "" if there is none."""
    parts = urlsplit(endpoint or "")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if parts.netloc else ""


def _scheme_and_host(endpoint: str) -> tuple[str, str]:
    """Return scheme and host of an address. It is checked here because the client library panics on some invalid addresses."""
    try:
        parts = urlsplit(endpoint)
        scheme, host, _ = parts.scheme.lower(), parts.hostname, parts.port
    except ValueError:
        scheme, host = "", None
    if scheme not in {"http", "https"} or not host or not endpoint.isascii() or any(character <= " " for character in endpoint):
        raise StoreError("the endpoint that the options or the environment name is not an address. Write it as https://HOST[:PORT].")
    return scheme, host


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _environment(*names: str) -> str | None:
    return next((value for name in names if (value := os.environ.get(name))), None)
