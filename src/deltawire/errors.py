"""Every error that deltawire raises on purpose. Each error has one remedy.

    DeltawireError
    ├── DeltaError                  a delta file cannot be used
    │   ├── CorruptDelta            its bytes are damaged, or break a rule of docs/format.md
    │   ├── UnsupportedVersion      its format version is one that this release does not read
    │   ├── DeltaTooLarge           it would expand to far more than its own size: a decompression bomb
    │   └── ResultMismatch          it decodes, but not to the state that its digest names
    ├── StateError                  a delta cannot be applied to a state
    │   ├── BaseMismatch            the state is not the one that the delta was made from
    │   ├── TensorMissing           the state lacks a tensor that the delta changes
    │   ├── TensorUnexpected        the state already has a tensor that the delta adds
    │   ├── DtypeMismatch           the element types of a tensor differ
    │   ├── ShapeMismatch           the element counts of a tensor differ
    │   └── StateNotWritable        a tensor, or the mapping itself, cannot be changed in place
    │       └── TensorsTied         two tensors share memory, but the delta does not change them alike
    ├── TensorError                 a tensor cannot be used at all
    │   ├── UnsupportedDtype        the format does not know its element type
    │   ├── UnsupportedTensor       it is neither a NumPy array nor a dense torch tensor on the CPU or a GPU
    │   ├── UnsupportedLayout       a model stores it in a form that cannot be read or written in place
    │   ├── UnquantisableWeight     a recipe cannot quantise it
    │   └── BadTensorName           its name is not allowed in a safetensors file
    ├── CheckpointError             a checkpoint file or directory cannot be read or written
    ├── StoreError                  a request to an object store failed
    │   ├── BadUrl                  the URL does not name a store
    │   ├── LocationOccupied        a new chain cannot begin in a location that holds other files
    │   ├── ObjectMissing           no object has that key
    │   ├── ObjectExists            an object with that key exists already (perhaps our own: read it back)
    │   ├── OutcomeUnknown          a write may or may not have happened
    │   ├── StoreUnavailable        all retries ended in time-outs, throttling or server errors
    │   ├── StoreDenied             credentials or permissions are missing
    │   ├── StoreFull               no space left
    │   └── StoreUnsuitable         it lacks a guarantee that the protocol needs
    ├── ChainError                  a chain of versions cannot be followed
    │   ├── NoChain                 nothing was published there yet
    │   ├── NoChannel               the chain has no channel of that name yet
    │   ├── RunMismatch             the location holds another run
    │   │   └── WrongRun            it is signed, but its name is not the one that the URL suggests
    │   ├── CorruptRecord           a record breaks a rule of docs/protocol.md
    │   ├── ChainBroken             commits do not fit together
    │   ├── RollbackDetected        the store shows less than before, or another history
    │   ├── ChainStale              the newest version is older than the reader allows
    │   ├── SignatureInvalid        a record is not signed by a trusted key
    │   ├── LimitExceeded           a record claims more than is allowed
    │   ├── DataDamaged             an object differs from what its record says
    │   ├── DataMissing             an object that must exist does not
    │   ├── RelayConflict           the store of a region holds another chain than the one to copy there
    │   ├── VersionUnknown          the chain has no such version
    │   └── VersionGone             the version's data were deleted by garbage collection
    ├── PublishError                a version could not be published
    │   ├── Fenced                  another publisher has taken over the run
    │   ├── CommitOutcomeUnknown    the commit may or may not have landed; the next call finds out
    │   ├── ChannelMoved            somebody else moved the channel first
    │   ├── NonFiniteWeights        some weights are NaN or infinite, and are refused
    │   ├── CloseTimeout            the store did not answer in time when the publisher was closed
    │   ├── RecipeMissing           the chain is quantised, and `deltawire publish` was not told how to continue it
    │   └── PublisherClosed         the publisher was closed
    ├── MirrorError                 a mirror directory cannot be used
    │   └── MirrorBusy              another process holds its lock and shows no progress
    ├── SpoolError                  a directory of files in transit, to an engine's workers or to a copy, cannot be used
    ├── EngineError                 a request to an engine failed
    │   ├── EngineUnavailable       it does not answer, pause or resume
    │   │   └── EngineAsleep        its weights are not in the memory of its device
    │   ├── EngineRefused           it cannot load these weights: names or shapes differ
    │   │   ├── EngineDtypeDiffers  the types of a tensor differ
    │   │   └── EngineModelDiffers  the model of a server is not the one of the chain
    │   ├── PeerUnreadable          a worker cannot read the memory of another worker
    │   ├── SwapFailed              a swap failed and was reverted; the engine serves the old version
    │   ├── EngineQuarantined       it stays paused because its weights are in an unknown state
    │   └── DecodingDiffers         after an update, it generates other tokens than its weights make
    ├── RewardError                 a reward function failed, or returned an invalid reward
    │   └── UnusableReward          it cannot be loaded, or needs a column that the dataset lacks
    ├── FleetError                  the fleet's work cannot continue
    │   ├── CorruptRollouts         a file of rollouts breaks a rule of docs/protocol.md
    │   ├── FleetTimeout            a round did not finish within the time limit
    │   └── FleetDeserted           all members left because of errors, and none came back
    ├── LiveError                   live traffic cannot be read
    │   ├── NoMetrics               the run declares no metrics, so that feedback means nothing
    │   ├── CorruptInteractions     a file of interactions breaks a rule of docs/protocol.md
    │   └── CorruptFeedback         a file of feedback breaks a rule of docs/protocol.md
    ├── GatewayError                a gateway refuses a request
    │   ├── RequestMalformed        the body, a header or a value breaks a rule
    │   ├── RouteUnknown            the gateway does not have the route
    │   ├── MethodUnknown           the route does not take the method of the request
    │   ├── RequestTooLarge         the body is larger than the gateway accepts
    │   ├── RequestSlow             the body did not arrive in time
    │   ├── KeyRefused              the API key is missing, unknown, or not meant for this route
    │   ├── HostRefused             the request was sent to a name that the gateway does not have
    │   ├── OriginRefused           a page sent the request whose origin the gateway was not told
    │   ├── ModelUnknown            the server has no model of that name
    │   ├── InteractionUnknown      there is no interaction or episode with that id
    │   ├── InteractionExpired      feedback came after the metric's window
    │   ├── EpisodeShared           several callers have an episode with that id
    │   ├── FeedbackConflict        the id of this feedback was used for other feedback
    │   ├── FeedbackNotStored       feedback could not be written to the store
    │   ├── EnginesAway             no engine answered within the time limit
    │   ├── EngineLost              an engine was lost in the middle of an answer
    │   ├── GatewayBusy             the gateway has too much to do
    │   └── GatewayFull             the requests at once take all memory that the gateway may use
    ├── TrainingError               training cannot begin, or cannot continue
    │   ├── UnusableRows            rows of the dataset cannot be used for generation or training
    │   ├── UnusableSettings        settings do not fit the model, for example too long completions
    │   ├── UnusableModelFiles      members cannot build the model: its config or tokenizer is missing
    │   ├── UnsupportedRouting      the model's way to choose experts is not known
    │   ├── UnusableRouting         recorded experts do not fit the model or the batch
    │   └── TrainingFailed          training fails even without the suspicious results
    ├── UnusableKeys                a gateway cannot read its file of API keys
    ├── UnusableGate                a gate cannot decide by the limits or numbers that it was given
    ├── UnusablePlan                a number that the planner was given cannot be used
    ├── AddressUnavailable          a server cannot listen on its address
    ├── TelemetryUnavailable        metrics, logs or traces cannot be passed on
    └── CodecUnavailable            the requested codec cannot run on this machine

Every error except `EngineQuarantined` leaves the state unchanged. If `retryable` is true, the same call may succeed later although nothing
else was changed.
"""

from __future__ import annotations

from collections.abc import Sequence


class DeltawireError(Exception):
    """The base class of all errors.

    Parameters
    ----------
    message
        What is wrong.
    hint
        What the user should do. It is shown after `message`. Each class has a default; pass one where the remedy is a different one.
    """

    hint: str = ""
    retryable: bool = False

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        if hint is not None:
            self.hint = hint
        super().__init__(f"{message} {self.hint}".rstrip())
        self.message = message


class DeltaError(DeltawireError):
    """A delta file cannot be used."""


class CorruptDelta(DeltaError):
    """The bytes are damaged or break a rule of the format."""

    hint = "Fetch or make the delta again."


class UnsupportedVersion(DeltaError):
    """This release does not read the file's format version."""

    hint = "Upgrade deltawire."


class DeltaTooLarge(DeltaError):
    """The tensors that the delta adds are far larger than the delta itself."""

    hint = "Do not use deltas from this source."


class ResultMismatch(DeltaError):
    """The delta decodes, but not to the state that its digest names."""

    hint = "The delta is damaged or was written by a faulty encoder; make it again."


class StateError(DeltawireError):
    """A delta cannot be applied to a state."""


class BaseMismatch(StateError):
    """The state is not the one that the delta was made from."""

    hint = "Apply the deltas in order, each to the state it was made from, or start again from a full checkpoint."


class TensorMissing(StateError):
    """The state lacks a tensor that the delta changes or removes."""

    hint = "Check that this is the model and the version that the delta was made from."


class TensorUnexpected(StateError):
    """The state already has a tensor that the delta adds."""

    hint = "Check whether this delta was applied before."


class DtypeMismatch(StateError):
    """A tensor has one element type in the state and another in the delta."""

    hint = "Do not cast weights between trainer and reader: deltas are bit-exact."


class ShapeMismatch(StateError):
    """A tensor has one number of elements in the state and another in the delta."""

    hint = "Check that this is the model that the delta was made from."


class StateNotWritable(StateError):
    """A tensor, or the mapping that holds it, cannot be changed in place."""

    hint = "Pass writable arrays in a mutable mapping, or use resolve_delta and write the values yourself."


class TensorsTied(StateNotWritable):
    """Two tensors of the state share memory, but the delta does not change them in the same way."""

    hint = (
        "If the trainer publishes tied weights under one name, pass a state without the other name. "
        "If the trainer does not tie them, untie them here: replace one of the two by a copy."
    )

    @classmethod
    def of(cls, one: str, other: str, *, changed: Sequence[str]) -> TensorsTied:
        """Return the error for these two tensors. `changed` lists which of them the delta changes."""
        how = f"changes only {changed[0]!r}" if len(changed) == 1 else "changes them in different ways"
        return cls(f"tensors {one!r} and {other!r} share memory in this state, but the delta {how}.")


class TensorError(DeltawireError):
    """A tensor cannot be used at all."""


class UnsupportedDtype(TensorError):
    """The format does not know the element type."""

    hint = "The format knows bool, (u)int8–64, fp8 e4m3fn, e5m2 and e8m0, fp16, bf16, fp32 and fp64."

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(f"element type {dtype!r} is not supported.")


class UnsupportedTensor(TensorError):
    """The object is neither a NumPy array nor a dense torch tensor on the CPU or an NVIDIA GPU."""

    hint = "Pass NumPy arrays or dense torch tensors, on the CPU or an NVIDIA GPU."


class UnsupportedLayout(TensorError):
    """A model stores the tensors of its checkpoints in a form that cannot be read or written in place."""

    hint = "Serve this model with an engine that loads whole checkpoints (DiskEngine, vLLM)."


class UnquantisableWeight(TensorError):
    """A recipe cannot quantise a weight: its shape, its type or its layer does not allow it."""

    hint = (
        "Choose another recipe, or leave the layer as it is: pass Recipe.parse(…, ignore=[*DEFAULT_IGNORE, the layer]) as the recipe, or "
        "--ignore on the command line."
    )


class BadTensorName(TensorError):
    """The name is not allowed in a safetensors file."""

    hint = "Use a non-empty string of valid Unicode other than '__metadata__'."


class CheckpointError(DeltawireError):
    """A checkpoint file or directory cannot be read or written."""


class StoreError(DeltawireError):
    """A request to an object store failed."""


class BadUrl(StoreError):
    """The URL does not name a store."""

    hint = (
        "Use a directory, file://, memory://NAME, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or hf://buckets/OWNER/NAME."
    )


class LocationOccupied(StoreError):
    """A new chain cannot begin in a location that holds other files. Nothing was written there."""

    hint = "Name a new or empty location, and check the order of the arguments: `deltawire publish CKPT URL`, `deltawire relay SRC DST`."


class ObjectMissing(StoreError):
    """No object has that key."""

    hint = "Check the URL and what the store holds there."


class ObjectExists(StoreError):
    """An object with that key exists already. After a retry it may be our own: read it back to find out."""

    hint = "Read the object back to find out who wrote it."


class OutcomeUnknown(StoreError):
    """A write may or may not have happened: the connection failed after it was sent."""

    hint = "Read the object back to find out."
    retryable = True


class StoreUnavailable(StoreError):
    """All retries ended in time-outs, throttling or server errors."""

    hint = "Check the network and the store's status, then try again."
    retryable = True


class StoreDenied(StoreError):
    """Credentials or permissions are missing."""

    hint = "Check the credentials in the environment, and what they are allowed to do in this location."


class StoreFull(StoreError):
    """No space is left, or a quota is used up."""

    hint = "Free space there, or run `deltawire gc`."
    retryable = True


class StoreUnsuitable(StoreError):
    """The store lacks a guarantee that the protocol needs."""

    hint = "Use a store that honours If-None-Match: * on writes (S3, GCS, Azure, Ceph, SeaweedFS, or a local directory)."


class ChainError(DeltawireError):
    """A chain of versions cannot be followed."""


class NoChain(ChainError):
    """Nothing was published there yet."""

    hint = "Check the URL, and whether the trainer has published its first version."
    retryable = True


class NoChannel(ChainError):
    """The chain has no channel of that name yet."""

    hint = "Check the name, or let the channel begin with `deltawire promote URL CHANNEL --version N`."
    retryable = True


class RunMismatch(ChainError):
    """The location holds another run."""

    hint = "Check the URL and the name of the run."


class WrongRun(RunMismatch):
    """A trusted key signed the chain here, but the run's name is not the one that the URL suggests."""

    hint = "If this is the run that you want, pass its name as `run=` or `--run`. Otherwise check the URL, and who can write there."


class CorruptRecord(ChainError):
    """A record breaks a rule of docs/protocol.md."""

    hint = "Run `deltawire verify` on the chain. It names everything that is damaged, and says what to do."


class ChainBroken(ChainError):
    """Commits do not fit together."""

    hint = "Run `deltawire verify` on the chain. Check who else can write to it."


class RollbackDetected(ChainError):
    """The store shows less than before, or another history.

    The error is `retryable` for one minute after a read first misses something, because a replica of the store may still catch up.
    """

    hint = (
        "The store's content was restored from a backup or replaced. Find out why. Publish new training at another URL. "
        "To accept the new content, restart every reader and engine, and give each mirror a new directory."
    )


class ChainStale(ChainError):
    """The newest version is older than the reader allows (`max_silence`)."""

    hint = "Check that the trainer runs, and that it writes to this store."
    retryable = True


class SignatureInvalid(ChainError):
    """A record is not signed by a trusted key, or its signature is wrong."""

    hint = "Trust the key that the publisher signs with, or find out who else can write there."


class LimitExceeded(ChainError):
    """A record claims more than is allowed."""

    hint = "Raise the limit if the model really is that large."


class DataDamaged(ChainError):
    """An object in the store differs from what its record says."""

    hint = "Run `deltawire verify --deep` on the chain."
    retryable = True


class DataMissing(ChainError):
    """An object that must exist is missing, even after waiting for replication."""

    hint = "Run `deltawire verify` on the chain. Check whether anything other than `deltawire gc` deleted objects."
    retryable = True


class RelayConflict(ChainError):
    """The store of a region holds another chain than the one that a relay would copy there."""

    hint = "Give the relay a location of its own, which no publisher writes to. If the origin was restored from a backup, use a new one."


class VersionUnknown(ChainError):
    """The chain has no such version."""

    hint = "`deltawire log` lists the versions; `deltawire log --commits` lists all commits."


class VersionGone(ChainError):
    """The version can no longer be rebuilt, because garbage collection deleted its data."""

    hint = "Choose a newer version; `deltawire log` says which can be rebuilt."


class PublishError(DeltawireError):
    """A version could not be published. The previous version is still the newest."""


class Fenced(PublishError):
    """Another publisher has taken over the run. This publisher stops for good."""

    hint = "Stop this process. If it is the right trainer, start a new Publisher, which fences the other one."


class CommitOutcomeUnknown(PublishError):
    """The commit may or may not have been written, because the store did not answer. The next call finds out first."""

    hint = "Publish again when the store answers."
    retryable = True


class ChannelMoved(PublishError):
    """Somebody else moved the channel first. Their move stays."""

    hint = "Look at it with `deltawire channels URL`, and decide again."


class RecipeMissing(PublishError):
    """The version before is quantised, and `deltawire publish` was called without `--quantise`. Nothing is published."""

    hint = "Pass --quantise RECIPE. To publish the checkpoint as it is, pass --quantise none."


class NonFiniteWeights(PublishError):
    """Some weights are NaN or infinite, and the publisher refuses such weights. Readers keep the previous version."""

    hint = (
        "Find the training step that made them, and go back to a checkpoint from before it. To publish them anyway, pass "
        "refuse_nonfinite=False, or --allow-nonfinite on the command line."
    )


class CloseTimeout(PublishError):
    """A publisher was closed, and versions that it had accepted were not published in time. They may still be, while the process runs."""

    hint = (
        "Check that calls of the store return. If the store is only slow, pass a longer WriterOptions(close_timeout=...). "
        "A new Publisher continues from the newest version in the chain."
    )


class PublisherClosed(PublishError):
    """The publisher was closed."""

    hint = "Open a new Publisher; it takes over the run."


class MirrorError(DeltawireError):
    """A mirror directory cannot be used."""


class MirrorBusy(MirrorError):
    """Another process holds a lock of the mirror, or of a spool, and shows no progress: it is stopped, or its machine is overloaded."""

    hint = "Let that process continue (kill -CONT) or end it. The next sync tries again."
    retryable = True


class SpoolError(DeltawireError):
    """A spool, a directory of files in transit, cannot be used, or a file in it is missing or damaged.

    One hands updates to the workers of an engine. Another has the large objects that a relay copies.
    """

    hint = "Check the directory's free space and permissions. Files that are missing there are fetched again."


class EngineError(DeltawireError):
    """A request to an engine failed."""


class EngineUnavailable(EngineError):
    """The engine does not answer, pause or resume. It holds all weights of one version, the old or the new one."""

    hint = "Check that the engine runs. The next sync tries again."
    retryable = True


class EngineAsleep(EngineUnavailable):
    """The engine is asleep: its weights are not in the memory of its device. Nothing was changed."""

    hint = "Wake the engine up (for vLLM: POST /wake_up). The next sync tries again."


class EngineRefused(EngineError):
    """The engine cannot load the weights of this chain. It continues to serve its own weights. Each message contains the remedy."""


class EngineDtypeDiffers(EngineRefused):
    """A tensor has one type in the engine and another in the chain. The engine continues to serve its own weights."""

    hint = "Nothing is cast, so that the engine serves exactly the bits that were published."


class EngineModelDiffers(EngineRefused):
    """The tensors of a chain do not fit the model that a server has loaded. Nothing was changed, and the server continues to serve it."""

    hint = "Name the right chain, or start the server with a checkpoint of this chain, such as the files that `deltawire pull` writes."


class PeerUnreadable(EngineError):
    """A worker of a server cannot read the memory of another worker on its host. No weights were changed."""

    hint = "The next sync tries again. If a worker has ended, restart the server. DELTAWIRE_PEERS=0 keeps a copy of the weights instead."
    retryable = True


class SwapFailed(EngineError):
    """A swap failed and was reverted. The engine serves the old version."""

    hint = "The next sync tries again."
    retryable = True


class EngineQuarantined(EngineError):
    """The engine stays paused because its weights are in an unknown state: a swap failed, and reverting it failed too."""

    hint = "The next sync loads a full checkpoint and resumes the engine. Until then it generates nothing."
    retryable = True


class DecodingDiffers(EngineError):
    """After an update, an engine generates other tokens, or other log-probs, than its weights make."""

    hint = "Restart the engine: its compiled graphs may read old memory, and loading weights again does not change that."


class RewardError(DeltawireError):
    """A reward function failed, or returned an invalid reward."""

    hint = "The module deltawire.rl.rewards documents what a reward function receives and returns."


class UnusableReward(RewardError):
    """A reward function cannot be loaded, or needs a column that the dataset lacks. Trying again does not help."""

    hint = "Correct the function, the name that --env gives it, or the dataset; then start the member again."


class FleetError(DeltawireError):
    """The fleet cannot continue its work."""


class CorruptRollouts(FleetError):
    """A file of rollouts is damaged, or breaks a rule of docs/protocol.md."""

    hint = "Nothing of it is used. Another member gets its task."


class FleetTimeout(FleetError):
    """A round did not finish within the time limit. Accepted results stay accepted."""

    hint = "Check with `deltawire members` that members run and have the version that the round needs. Collect again to keep waiting."
    retryable = True


class FleetDeserted(FleetError):
    """All members left because of errors, and none came back. Accepted results stay accepted. Collect again to keep waiting."""

    hint = (
        "Correct the causes that they report, restart the trainer (it continues where it was), then start members. "
        "With FleetOptions(patience_seconds=math.inf) a trainer waits without a limit."
    )


class LiveError(DeltawireError):
    """Live traffic cannot be recorded, read or joined."""


class NoMetrics(LiveError):
    """The run declares no metrics, so that feedback cannot become rewards."""

    hint = "Pass metrics, for example LiveTraffic(url, metrics=[Metric('thumbs', window=3600, default=0.0)])."


class CorruptInteractions(LiveError):
    """A file of interactions is damaged, or breaks a rule of docs/protocol.md."""

    hint = "Nothing of it is used. Check which gateway wrote it, and who else can write to the store."


class CorruptFeedback(LiveError):
    """A file of feedback is damaged, or breaks a rule of docs/protocol.md."""

    hint = "Nothing of it is used. Check which gateway wrote it, and who else can write to the store."


class GatewayError(DeltawireError):
    """A gateway refuses a request. `status` is the HTTP status of its answer."""

    status = 500


class RequestMalformed(GatewayError):
    """The body of a request, a header or a value breaks a rule."""

    hint = "Correct the request. The page 'Learn from live traffic' of the documentation describes each route."
    status = 400


class RouteUnknown(GatewayError):
    """The gateway does not have the route of a request."""

    hint = "Set base_url to the address of the gateway with /v1 at its end."
    status = 404


class MethodUnknown(GatewayError):
    """A route does not take the method of a request."""

    hint = "Use the method that the message names."
    status = 405


class RequestTooLarge(GatewayError):
    """The body of a request is larger than the gateway accepts."""

    hint = "Send less, or start the gateway with a larger --most-bytes."
    status = 413


class RequestSlow(GatewayError):
    """The body of a request did not arrive within the time limit."""

    hint = "Send the request again over a faster connection, or send less."
    status = 408
    retryable = True


class KeyRefused(GatewayError):
    """The API key is missing or unknown, or it is not meant for this route."""

    hint = "Send the header `Authorization: Bearer KEY` with a key from the gateway's --keys file."
    status = 401


class HostRefused(GatewayError):
    """A request was sent to a name that the gateway does not have."""

    hint = "Use the address in numbers, or start the gateway with --name."
    status = 421


class ModelUnknown(GatewayError):
    """A request names a model that the server does not have."""

    hint = "Name that one, or leave `model` out. `GET /v1/models` lists it, and `deltawire serve --model` sets the name."
    status = 404


class OriginRefused(GatewayError):
    """A browser sent a request for a page, and the gateway was not told the origin of that page."""

    hint = "If the page may use this gateway, start the gateway with --origin and the origin of the page."
    status = 403


class InteractionUnknown(GatewayError):
    """The gateway knows no interaction or episode with this id."""

    hint = "Send the id of an answer that was recorded. An answer of another gateway is known a few seconds after it was given."
    status = 404


class InteractionExpired(GatewayError):
    """Feedback came after the window of its metric."""

    hint = "Send feedback earlier, or declare the metric with a longer window."
    status = 410


class EpisodeShared(GatewayError):
    """Feedback on an episode does not say whose episode it means, and several callers have one with this id."""

    hint = "Send the name of the caller in the field `caller`, or send feedback on single answers."
    status = 409


class FeedbackConflict(GatewayError):
    """The id of this feedback was used before, for feedback with other contents."""

    hint = "Send changed feedback with a new id and a higher revision."
    status = 409


class FeedbackNotStored(GatewayError):
    """The store did not confirm this feedback, so it may be lost."""

    hint = "Send it again with the same feedback_id: it counts once."
    status = 503
    retryable = True


class EnginesAway(GatewayError):
    """No engine of the channel answered within the time limit."""

    hint = "Check that the engines run, and that their versions are on their channel."
    status = 503
    retryable = True


class EngineLost(GatewayError):
    """An engine was lost in the middle of an answer, after its beginning had been sent."""

    hint = "Send the request again."
    status = 502
    retryable = True


class GatewayBusy(GatewayError):
    """The gateway has more requests at once than it is allowed to have."""

    hint = "Send the request again later."
    status = 429
    retryable = True


class GatewayFull(GatewayError):
    """The requests that a gateway has at once take all the memory that they may take."""

    hint = "Send the request again later, or start the gateway with a larger --memory-bytes."
    status = 503
    retryable = True


class TrainingError(DeltawireError):
    """Training cannot begin or continue."""


class UnusableRows(TrainingError):
    """Members cannot use rows of the dataset, or their completions cannot be trained on."""

    hint = "Correct these rows, or remove them from the dataset."


class UnusableSettings(TrainingError):
    """Settings do not fit the model and the dataset."""

    hint = "Set a smaller `max_completion_length`, or use a model with more positions."


class UnusableModelFiles(TrainingError):
    """Members cannot build the model or its tokenizer from the published attachments."""

    hint = (
        "Pass `attachments`: the model's directory, or its config.json and the files of its tokenizer. "
        "For a transformers model, `tokenizer=` with the tokenizer itself is enough."
    )


class UnsupportedRouting(TrainingError):
    """A model chooses or weights experts in a way that is not known, so that recorded experts cannot be replayed. Nothing was changed."""

    hint = "Train without router replay, or with a model that docs/router-replay.md names."


class UnusableRouting(TrainingError):
    """Recorded experts do not fit the model or the batch. They are not replayed, and nothing is trained on them."""

    hint = "Record them with the model that is trained, and pass one row of experts for each token."


class TrainingFailed(TrainingError):
    """Training fails even without the suspicious results. Nothing of the failed step was published."""

    hint = 'Read the events "step-skipped" and "rollout-rejected", correct the causes that they name, and start the trainer again.'


class UnusableKeys(DeltawireError):
    """A gateway cannot use its file of API keys."""

    hint = "Each line is: NAME SHA256 [feedback] [all]. The second word is what `printf %s \"$KEY\" | sha256sum | cut -d' ' -f1` prints."


class UnusableGate(DeltawireError):
    """A gate cannot decide by the limits or numbers that it was given."""

    hint = "Change the limits of the gate. `deltawire gate --help` explains them."


class UnusablePlan(DeltawireError):
    """A number or a name that the planner was given cannot be used."""

    hint = "Correct it, and plan again."


class AddressUnavailable(DeltawireError):
    """A server cannot listen on its address, mostly because another program does."""

    hint = "Choose another port or address."


class TelemetryUnavailable(DeltawireError):
    """Events cannot be passed on to another system, because its package is missing or it cannot be reached."""

    hint = "Install the package, or leave the listener out."


class CodecUnavailable(DeltawireError):
    """The requested codec cannot run on this machine."""

    hint = "Unset DELTAWIRE_CODEC to let deltawire choose."
