"""Every error deltawire raises on purpose. One error, one remedy.

    DeltawireError
    ├── DeltaError                  a delta file cannot be used
    │   ├── CorruptDelta            its bytes are damaged, or break a rule of docs/format.md
    │   ├── UnsupportedVersion      it is of a format version this release does not read
    │   ├── DeltaTooLarge           it would unfold to far more than its own size: a decompression bomb
    │   └── ResultMismatch          it decodes, but not to the state its digest promises
    ├── StateError                  a state cannot take this delta
    │   ├── BaseMismatch            it is not the state that the delta was made from
    │   ├── TensorMissing           it lacks a tensor that the delta changes
    │   ├── TensorUnexpected        it already holds a tensor that the delta adds
    │   ├── DtypeMismatch           a tensor has another element type than the delta's
    │   ├── ShapeMismatch           a tensor has another number of elements than the delta's
    │   └── StateNotWritable        a tensor, or the mapping itself, cannot be changed in place
    │       └── TensorsTied         two tensors share memory, but the delta does not change them alike
    ├── TensorError                 a tensor cannot be used at all
    │   ├── UnsupportedDtype        its element type is none that the format knows
    │   ├── UnsupportedTensor       it is neither a NumPy array nor a dense torch tensor on the CPU or a GPU
    │   ├── UnsupportedLayout       a model does not hold it in one place, so it cannot be read or written there
    │   └── BadTensorName           its name cannot stand in a safetensors file
    ├── CheckpointError             a checkpoint file or directory cannot be read or written
    ├── StoreError                  an object store did not do what was asked
    │   ├── BadUrl                  a URL that names no store
    │   ├── PlaceOccupied           other files are where a new chain was to begin
    │   ├── ObjectMissing           there is no object of that name
    │   ├── ObjectExists            create-if-absent found one of that name (it may be our own: read it back)
    │   ├── OutcomeUnknown          a write may or may not have happened
    │   ├── StoreUnavailable        time-outs, throttling or server errors outlasted all retries
    │   ├── StoreDenied             credentials or permissions are missing
    │   ├── StoreFull               no space left
    │   └── StoreUnsuitable         it lacks a guarantee that the protocol is built on
    ├── ChainError                  a chain of versions cannot be followed
    │   ├── NoChain                 nothing was published there yet
    │   ├── RunMismatch             another run lives there
    │   │   └── WrongRun            it is signed, but its name is not the one that the URL suggests
    │   ├── CorruptRecord           a record breaks a rule of docs/protocol.md
    │   ├── ChainBroken             commits do not fit together
    │   ├── RollbackDetected        the store shows less, or another history, than was seen before
    │   ├── ChainStale              no version for longer than is credible
    │   ├── SignatureInvalid        a record is not signed by a trusted key
    │   ├── LimitExceeded           a record claims more than is allowed
    │   ├── DataDamaged             an object is not what its record says
    │   ├── DataMissing             an object that must exist does not
    │   ├── VersionUnknown          the chain has no such version
    │   └── VersionGone             the version can no longer be rebuilt: its data were collected
    ├── PublishError                a version could not be published
    │   ├── Fenced                  another publisher has taken over the run
    │   ├── CommitOutcomeUnknown    the commit may or may not have landed; the next call finds out
    │   ├── NonFiniteWeights        some weights are NaN or infinite, and are refused
    │   └── PublisherClosed         it was closed
    ├── MirrorError                 a mirror directory cannot be used
    │   └── MirrorBusy              another process holds its lock, and shows no sign of life
    ├── EngineError                 an engine did not do what was asked
    │   ├── EngineUnavailable       it does not answer, pause or resume
    │   ├── EngineRefused           it cannot take these weights: names or shapes differ
    │   │   └── EngineDtypeDiffers  it holds a tensor with another type
    │   ├── SwapFailed              a swap failed and was taken back; the old version serves on
    │   └── EngineFenced            it is paused, since nobody knows what its weights are
    ├── RewardError                 a reward function failed, or returned what no reward may be
    │   └── UnusableReward          it cannot be loaded, or wants a column that the dataset does not have
    ├── FleetError                  the fleet's work cannot go on
    │   ├── CorruptRollouts         a file of rollouts breaks a rule of docs/protocol.md
    │   ├── FleetTimeout            a round did not settle in the time that was given
    │   └── FleetDeserted           all members have left because of errors, and nobody has come back
    ├── TrainingError               training cannot begin, or cannot go on
    │   ├── UnusableRows            rows of the dataset cannot be given to members, or trained on
    │   ├── UnusableSettings        settings do not fit the model: completions may be longer than its positions
    │   ├── UnusableModelFiles      members could not build the model: its config or tokenizer is missing
    │   └── TrainingFailed          training failed in a way that leaving results out does not cure
    └── CodecUnavailable            the codec that was asked for cannot run here

All errors but `EngineFenced` leave the state as it was. `retryable` says whether the same call may succeed later without anything else
being changed.
"""

from __future__ import annotations

from collections.abc import Sequence


class DeltawireError(Exception):
    """Root of the tree. `hint` says what to do about it; it is part of what is shown, after `message`.

    A `hint` that is passed replaces that of the class, where the same error has another remedy.
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
    """The file is of a version that this release does not read."""

    hint = "Upgrade deltawire."


class DeltaTooLarge(DeltaError):
    """The tensors that it adds are out of all proportion to its size."""

    hint = "Do not trust where it came from."


class ResultMismatch(DeltaError):
    """The delta decodes, but not to the state that its digest promises."""

    hint = "The delta is damaged or was written by a faulty encoder; make it again."


class StateError(DeltawireError):
    """A state cannot take this delta."""


class BaseMismatch(StateError):
    """The state is not the one that the delta was made from."""

    hint = "Apply the deltas in order, each to the state it was made from, or start again from a full checkpoint."


class TensorMissing(StateError):
    """The state lacks a tensor that the delta changes or removes."""

    hint = "Is this the model, and the version of it, that the delta was made from?"


class TensorUnexpected(StateError):
    """The state already holds a tensor that the delta adds."""

    hint = "Was this delta applied before?"


class DtypeMismatch(StateError):
    """A tensor of the state has another element type than the delta's."""

    hint = "Cast nothing between trainer and reader: deltas are exact."


class ShapeMismatch(StateError):
    """A tensor of the state has another number of elements than the delta's."""

    hint = "Is this the model that the delta was made from?"


class StateNotWritable(StateError):
    """A tensor, or the mapping that holds it, cannot be changed in place."""

    hint = "Pass writable arrays in a mutable mapping, or use resolve_delta and place the values yourself."


class TensorsTied(StateNotWritable):
    """Two tensors of the state share memory, but the delta does not change them in the same way."""

    hint = (
        "If the trainer publishes tied weights under one name, pass a state without the other name. "
        "If the trainer does not tie them, untie them here: replace one of the two by a copy."
    )

    @classmethod
    def of(cls, one: str, other: str, *, changed: Sequence[str]) -> TensorsTied:
        """The error for these two tensors, of which the delta has changes for `changed`."""
        how = f"changes only {changed[0]!r}" if len(changed) == 1 else "changes them in different ways"
        return cls(f"tensors {one!r} and {other!r} share memory in this state, but the delta {how}.")


class TensorError(DeltawireError):
    """A tensor cannot be used at all."""


class UnsupportedDtype(TensorError):
    """The element type is none that the format knows."""

    hint = "Known are bool, (u)int8–64, fp8 e4m3fn, e5m2 and e8m0, fp16, bf16, fp32 and fp64."

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        super().__init__(f"element type {dtype!r} is not supported.")


class UnsupportedTensor(TensorError):
    """The object is neither a NumPy array nor a dense torch tensor on the CPU or an NVIDIA GPU."""

    hint = "Pass NumPy arrays or dense torch tensors, on the CPU or an NVIDIA GPU."


class UnsupportedLayout(TensorError):
    """A model holds the tensors of its checkpoints in a form that they cannot be read from, or written to, in place."""

    hint = "Serve this model with an engine that loads whole checkpoints (DiskEngine, vLLM)."


class BadTensorName(TensorError):
    """The name cannot stand in a safetensors file."""

    hint = "Names are non-empty strings of valid Unicode, other than '__metadata__'."


class CheckpointError(DeltawireError):
    """A checkpoint file or directory cannot be read or written."""


class StoreError(DeltawireError):
    """An object store did not do what was asked."""


class BadUrl(StoreError):
    """The URL names no store."""

    hint = (
        "Use a directory, file://, memory://NAME, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or hf://buckets/OWNER/NAME."
    )


class PlaceOccupied(StoreError):
    """A new chain was to begin at a place that holds other files. Nothing was written there."""

    hint = "Name a new or empty place. On the command line the checkpoint comes first: `deltawire publish CKPT URL`."


class ObjectMissing(StoreError):
    """There is no object of that name."""

    hint = "Look at the URL and at what the store holds there."


class ObjectExists(StoreError):
    """Create-if-absent found an object of that name. After a retry on the way it may be our own: read it back and look."""

    hint = "Read it back to see whose it is."


class OutcomeUnknown(StoreError):
    """A write may or may not have happened: the connection failed after it was sent."""

    hint = "Read back to find out."

    retryable = True


class StoreUnavailable(StoreError):
    """Time-outs, throttling or server errors outlasted all retries."""

    hint = "Check the network and the store's status, then try again."
    retryable = True


class StoreDenied(StoreError):
    """Credentials or permissions are missing."""

    hint = "Check the credentials in the environment, and what they are allowed to do at this place."


class StoreFull(StoreError):
    """No space is left, or a quota is used up."""

    hint = "Free space there, or let `deltawire gc` do so."
    retryable = True


class StoreUnsuitable(StoreError):
    """The store lacks a guarantee that the protocol is built on."""

    hint = "Use a store that honours If-None-Match: * on writes (S3, GCS, Azure, Ceph, SeaweedFS, or a local directory)."


class ChainError(DeltawireError):
    """A chain of versions cannot be followed."""


class NoChain(ChainError):
    """Nothing was published there yet."""

    hint = "Is the URL right, and has the trainer published its first version?"
    retryable = True


class RunMismatch(ChainError):
    """Another run lives at this place."""

    hint = "Check the URL and the name of the run."


class WrongRun(RunMismatch):
    """A trusted key signed the chain here, but the run's name is not the one that the URL suggests."""

    hint = "If this is the run that you want, pass its name as `run=` or `--run`. Otherwise check the URL, and who can write there."


class CorruptRecord(ChainError):
    """A record breaks a rule of docs/protocol.md."""

    hint = "Run `deltawire verify` on the chain."


class ChainBroken(ChainError):
    """Commits do not fit together."""

    hint = "Run `deltawire verify` on the chain; somebody wrote to it who should not."


class RollbackDetected(ChainError):
    """The store shows less, or another history, than was seen before.

    The error is `retryable` for a minute after the first look that missed something: a replica of the store may be behind, and catch up.
    """

    hint = "Somebody restored or replaced the store's content. Find out who; to accept it, start again, with a new mirror directory."


class ChainStale(ChainError):
    """No new version appeared for longer than is credible."""

    hint = "Is the trainer alive, and is this store the one that it writes to?"
    retryable = True


class SignatureInvalid(ChainError):
    """A record is not signed by a trusted key, or its signature is wrong."""

    hint = "Trust the key that the publisher signs with, or find out who else writes there."


class LimitExceeded(ChainError):
    """A record claims more than is allowed."""

    hint = "Raise the limit if the model really is that large."


class DataDamaged(ChainError):
    """An object in the store is not what its record says."""

    hint = "Run `deltawire verify --deep` on the chain."
    retryable = True


class DataMissing(ChainError):
    """An object that must exist does not, even after waiting for replication."""

    hint = "Run `deltawire verify` on the chain. Did something other than `deltawire gc` delete objects?"
    retryable = True


class VersionUnknown(ChainError):
    """The chain has no such version."""

    hint = "`deltawire log` lists the versions."


class VersionGone(ChainError):
    """The version can no longer be rebuilt: its data were collected as garbage."""

    hint = "Choose a newer version; `deltawire log` says which can be rebuilt."


class PublishError(DeltawireError):
    """A version could not be published. The one before it is still the newest."""


class Fenced(PublishError):
    """Another publisher has taken over the run; this one has halted for good."""

    hint = "Stop this process. If it is the right trainer after all, start a new Publisher: that fences the other."


class CommitOutcomeUnknown(PublishError):
    """The commit may or may not have landed: the store could not be asked. The next call finds out first."""

    hint = "Publish again when the store answers."
    retryable = True


class NonFiniteWeights(PublishError):
    """Some weights are NaN or infinite, and the publisher was told to refuse them. Readers keep the version before."""

    hint = (
        "Find the training step that made them, and go back to a checkpoint from before it. To publish them all the same, pass "
        "refuse_nonfinite=False, or --allow-nonfinite on the command line."
    )


class PublisherClosed(PublishError):
    """The publisher was closed."""

    hint = "Open a new one; that takes the run over."


class MirrorError(DeltawireError):
    """A mirror directory cannot be used."""


class MirrorBusy(MirrorError):
    """Another process holds a lock of the mirror and shows no sign of life: it is stopped, or its machine is overloaded."""

    hint = "Let that process continue (kill -CONT) or end it. The next sync tries again."
    retryable = True


class EngineError(DeltawireError):
    """An engine did not do what was asked."""


class EngineUnavailable(EngineError):
    """The engine does not answer, or does not pause or resume. Its weights are whole, of the old version or the new one."""

    hint = "Is it running? The next sync tries again."
    retryable = True


class EngineRefused(EngineError):
    """The engine cannot take the weights of this chain. Its own go on being served."""

    hint = "Is it the model that is published there? Names are mapped by the engine's `names`."


class EngineDtypeDiffers(EngineRefused):
    """The engine holds a tensor with another type than the chain. Its own weights go on being served."""

    hint = "Nothing is cast, so that what is served has exactly the bits that are published."


class SwapFailed(EngineError):
    """A swap failed and was taken back: the old version serves on."""

    hint = "The next sync tries again."
    retryable = True


class EngineFenced(EngineError):
    """The engine is paused for nobody knows what its weights are: a swap failed, and so did taking it back."""

    hint = "The next sync loads a whole checkpoint and resumes; until then nothing is generated."
    retryable = True


class RewardError(DeltawireError):
    """A reward function failed, or returned what no reward may be."""

    hint = "deltawire.rl.rewards says what one is called with and returns."


class UnusableReward(RewardError):
    """A reward function cannot be loaded, or wants a column that the dataset does not have. Trying again does not help."""

    hint = "Correct the function, the name that --env gives it, or the dataset; then start the member again."


class FleetError(DeltawireError):
    """The fleet's work cannot go on."""


class CorruptRollouts(FleetError):
    """A file of rollouts is damaged, or breaks a rule of docs/protocol.md."""

    hint = "Nothing of it is used; its task is given to another member."


class FleetTimeout(FleetError):
    """A round did not settle in the time that was given. What was accepted stays accepted."""

    hint = "Are members alive (`deltawire fleet`), and of the version that the round asks for? Collect again to wait on."
    retryable = True


class FleetDeserted(FleetError):
    """All members have left because of errors, and nobody has come back. What was accepted stays accepted. Collect again to wait on."""

    hint = (
        "Correct what they name, start the trainer again (it goes on where it was), and then members. "
        "With FleetOptions(patience_seconds=math.inf) a trainer waits for ever."
    )


class TrainingError(DeltawireError):
    """Training cannot begin, or cannot go on."""


class UnusableRows(TrainingError):
    """Rows of the dataset cannot be given to members, or completions of them cannot be trained on."""

    hint = "Correct these rows, or leave them out of the dataset."


class UnusableSettings(TrainingError):
    """Settings do not fit the model and the dataset."""

    hint = "Set a smaller `max_completion_length`, or use a model with more positions."


class UnusableModelFiles(TrainingError):
    """Members could not build the model, or its tokenizer, from what is published beside the weights."""

    hint = (
        "Pass `attachments`: the model's directory, or its config.json and the files of its tokenizer. "
        "For a model of transformers, `tokenizer=` with the tokenizer itself is enough."
    )


class TrainingFailed(TrainingError):
    """Training failed in a way that leaving results out does not cure. Nothing of the failed step was published."""

    hint = 'Look at the events "step-skipped" and "rollout-rejected", correct what they name, and start the trainer again.'


class CodecUnavailable(DeltawireError):
    """The codec that was asked for cannot run here."""

    hint = "Unset DELTAWIRE_CODEC to let deltawire choose."
