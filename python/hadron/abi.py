"""ctypes binding of Hadron's C ABI, hadron.h. Tensors of torch are passed as address, size and dtype."""

import ctypes
import functools
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from hadron.environment import read_environment

if TYPE_CHECKING:
    import torch

ABI_VERSION = 2
ERROR_BYTES = 4096
DESCRIPTION_BYTES = 1 << 18


class Status(IntEnum):
    """enum hadron_status"""

    OK = 0
    REJECTED = 1
    FAILED = 2
    BUG = 3


class DType(IntEnum):
    """enum hadron_dtype"""

    F32 = 0
    BF16 = 1
    F16 = 2
    F8_E4M3 = 3
    I32 = 4
    I64 = 5


DTYPES = {
    "torch.float32": DType.F32,
    "torch.bfloat16": DType.BF16,
    "torch.float16": DType.F16,
    "torch.float8_e4m3fn": DType.F8_E4M3,
    "torch.int32": DType.I32,
    "torch.int64": DType.I64,
}
# Hosts allocate FP8 KV caches as bytes.
KV_DTYPES = DTYPES | {"torch.uint8": DType.F8_E4M3}

AllGather = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p)


class HadronArray(ctypes.Structure):
    """struct hadron_array"""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("dtype", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class HadronRanks(ctypes.Structure):
    """struct hadron_ranks"""

    _fields_ = (
        ("context", ctypes.c_void_p),
        ("all_gather", AllGather),
        ("rank", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
    )


class HadronStep(ctypes.Structure):
    """struct hadron_step"""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("one_token_rows", ctypes.c_uint32),
        ("stream", ctypes.c_uint64),
        ("token_ids", HadronArray),
        ("positions", HadronArray),
        ("slots", HadronArray),
        ("row_starts", HadronArray),
        ("context_lens", HadronArray),
        ("block_tables", HadronArray),
        ("output_tokens", HadronArray),
        ("hidden", HadronArray),
        ("tokens", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("table_width", ctypes.c_uint32),
        ("decode_rows", ctypes.c_uint32),
        ("max_query_len", ctypes.c_uint32),
        ("max_context_len", ctypes.c_uint32),
        ("outputs", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


class HadronCounters(ctypes.Structure):
    """struct hadron_counters"""

    _fields_ = (
        ("allocations", ctypes.c_uint64),
        ("kernel_modules", ctypes.c_uint64),
        ("synchronizations", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
    )


class HadronError(RuntimeError):
    """An error of the library, with its text."""


class LibraryError(HadronError):
    """The library is missing, or has another version of the interface."""


class RejectedError(HadronError):
    """An argument or option is invalid or not supported. The model remains usable."""


class FailedError(HadronError):
    """The device or another rank failed. The model must be closed."""


class BugError(HadronError):
    """The library panicked. The model must be closed."""


ERRORS = {Status.REJECTED: RejectedError, Status.FAILED: FailedError, Status.BUG: BugError}


@dataclass(frozen=True)
class KvLayer:
    """A layer of the KV cache: `kind` is "heads" (keys and values of `heads` heads) or "mla" (one latent per token)."""

    kind: str
    heads: int
    width: int
    dtype: str

    def token_elements(self) -> int:
        """Elements that the layer stores per token."""
        return self.heads * self.width * (2 if self.kind == "heads" else 1)


@dataclass(frozen=True)
class ModelDescription:
    """Facts about an open model."""

    architecture: str
    device: str
    hidden_size: int
    vocab_size: int
    weight_bytes: int
    heads: int
    kv_layers: tuple[KvLayer, ...]


@dataclass(frozen=True)
class StepInputs:
    """Inputs and outputs of one forward pass; see struct hadron_step."""

    token_ids: "torch.Tensor"
    positions: "torch.Tensor"
    slots: "torch.Tensor"
    # Is not read, and may be None, if `one_token_rows`.
    row_starts: "torch.Tensor | None"
    context_lens: "torch.Tensor"
    block_tables: "torch.Tensor"
    # Indices of the tokens whose hidden states are computed; None computes those of all tokens.
    output_tokens: "torch.Tensor | None"
    hidden: "torch.Tensor"
    tokens: int
    rows: int
    decode_rows: int
    max_query_len: int
    max_context_len: int
    one_token_rows: bool
    stream: int


class Ranks(Protocol):
    """Communication of the ranks of a host with tensor parallelism."""

    rank: int
    size: int

    def all_gather(self, own: bytes) -> list[bytes]:
        """Returns the bytes of all ranks, in rank order. All ranks call this together, with equally many bytes."""
        ...


class RanksRecord:
    """The ranks as a struct hadron_ranks. An exception of `all_gather` is kept, because it cannot cross the library."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._function = AllGather(self._all_gather)
        self.record = HadronRanks(None, self._function, ranks.rank, ranks.size)
        self.error: BaseException | None = None

    def _all_gather(self, _context: int | None, own: int, size: int, gathered: int) -> int:
        try:
            parts = self._ranks.all_gather(ctypes.string_at(own, size))
            sizes = [len(part) for part in parts]
            if sizes != [size] * self._ranks.size:
                raise ValueError(f"all_gather returned {sizes} bytes, not {size} of each of {self._ranks.size} ranks")
            ctypes.memmove(gathered, b"".join(parts), sum(sizes))
        except BaseException as error:
            self.error = error
            return 1
        return 0


def library_path() -> Path:
    """Returns the path of the library: that of HADRON_PLUGIN_LIBRARY, or the one in this package."""
    return read_environment().plugin_library or Path(__file__).with_name("libhadron_plugin.so")


@functools.cache
def load_library(path: Path) -> ctypes.CDLL:
    """Loads the library and checks the version of its interface."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"Hadron's library cannot be loaded: {error}") from error
    library.hadron_abi_version.restype = ctypes.c_uint32
    version = library.hadron_abi_version()
    if version != ABI_VERSION:
        raise LibraryError(
            f"{path} has version {version} of Hadron's interface, this package needs version {ABI_VERSION}"
        )
    _declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    handle, text, count, status = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int32
    array, error = ctypes.POINTER(HadronArray), (text, count)
    functions = {
        "hadron_version": (text, ()),
        "hadron_open": (status, (text, count, ctypes.POINTER(HadronRanks), ctypes.POINTER(handle), *error)),
        "hadron_describe": (status, (handle, text, count, *error)),
        "hadron_rehearse": (status, (handle, *error)),
        "hadron_bind_kv": (status, (handle, array, count, count, count, *error)),
        "hadron_forward": (status, (handle, ctypes.POINTER(HadronStep), *error)),
        "hadron_logits": (status, (handle, count, array, array, count, *error)),
        "hadron_count": (status, (handle, ctypes.POINTER(HadronCounters), *error)),
        "hadron_close": (None, (handle,)),
    }
    for name, (result, arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments


def library_version() -> str:
    """Returns the version of Hadron in the library."""
    return load_library(library_path()).hadron_version().decode()


def array(name: str, tensor: "torch.Tensor", dtypes: dict[str, DType] = DTYPES) -> HadronArray:
    """Describes the memory of a contiguous tensor. The library checks size, dtype and alignment for each argument."""
    dtype = dtypes.get(str(tensor.dtype))
    if dtype is None:
        raise RejectedError(f"{name}: dtype {tensor.dtype} is not supported")
    if not tensor.is_contiguous():
        raise RejectedError(f"{name}: shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous")
    return HadronArray(tensor.data_ptr(), tensor.numel() * tensor.element_size(), dtype, 0)


class Model:
    """One model of one rank. Its state belongs to the object, so several models may be used in turn."""

    def __init__(self, options: dict[str, Any], ranks: Ranks | None = None, path: Path | None = None) -> None:
        """Loads a model with the options of hadron_open. All ranks call this together."""
        self._library = load_library(path or library_path())
        self._error = ctypes.create_string_buffer(ERROR_BYTES)
        self._ranks = RanksRecord(ranks) if ranks else None
        self._handle = self._open(json.dumps(options).encode())
        self._close = weakref.finalize(self, self._library.hadron_close, self._handle)

    def _open(self, options: bytes) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        record = ctypes.byref(self._ranks.record) if self._ranks else None
        out = (ctypes.byref(handle), self._error, ERROR_BYTES)
        status = self._library.hadron_open(options, len(options), record, *out)
        host_error = self._ranks.error if self._ranks else None
        if isinstance(host_error, Exception):
            text = self._error.value.decode(errors="replace")
            raise FailedError(f"{text}: {type(host_error).__name__}: {host_error}") from host_error
        if host_error is not None:  # The process is to end.
            raise host_error
        self._check(status)
        return handle

    def describe(self) -> ModelDescription:
        """Returns facts about the model."""
        room = ctypes.create_string_buffer(DESCRIPTION_BYTES)
        self._call(self._library.hadron_describe, room, DESCRIPTION_BYTES)
        facts = json.loads(room.value)
        facts["kv_layers"] = tuple(_kv_layer(layer) for layer in facts["kv_layers"])
        return ModelDescription(**{field.name: facts[field.name] for field in fields(ModelDescription)})

    def rehearse(self) -> None:
        """Compiles all kernels and allocates the memory of the largest steps."""
        self._call(self._library.hadron_rehearse)

    def bind_kv(self, layers: Sequence["torch.Tensor"], blocks: int, block_tokens: int) -> None:
        """Binds the memory of the KV cache, one tensor per layer. The caller keeps the tensors while steps use them."""
        arrays = [array(f"layers[{i}]", layer, KV_DTYPES) for i, layer in enumerate(layers)]
        self._call(
            self._library.hadron_bind_kv, (HadronArray * len(arrays))(*arrays), len(arrays), blocks, block_tokens
        )

    def forward(self, step: StepInputs) -> None:
        """Runs the forward pass of a step."""
        record = HadronStep(
            struct_bytes=ctypes.sizeof(HadronStep),
            one_token_rows=int(step.one_token_rows),
            stream=step.stream,
            token_ids=array("token_ids", step.token_ids),
            positions=array("positions", step.positions),
            slots=array("slots", step.slots),
            row_starts=HadronArray() if step.row_starts is None else array("row_starts", step.row_starts),
            context_lens=array("context_lens", step.context_lens),
            block_tables=array("block_tables", step.block_tables),
            output_tokens=HadronArray() if step.output_tokens is None else array("output_tokens", step.output_tokens),
            hidden=array("hidden", step.hidden),
            tokens=step.tokens,
            rows=step.rows,
            table_width=step.block_tables.shape[1],
            decode_rows=step.decode_rows,
            max_query_len=step.max_query_len,
            max_context_len=step.max_context_len,
            outputs=0 if step.output_tokens is None else len(step.output_tokens),
            reserved=0,
        )
        self._call(self._library.hadron_forward, ctypes.byref(record))

    def logits(self, stream: int, hidden: "torch.Tensor", logits: "torch.Tensor") -> None:
        """Computes the logits of all rows of `hidden`."""
        inputs, outputs = array("hidden", hidden), array("logits", logits)
        rows = hidden.shape[0]
        self._call(self._library.hadron_logits, stream, ctypes.byref(inputs), ctypes.byref(outputs), rows)

    def count(self) -> HadronCounters:
        """Returns the counters of the model."""
        counters = HadronCounters()
        self._call(self._library.hadron_count, ctypes.byref(counters))
        return counters

    def close(self) -> None:
        """Frees the model. Later calls of other methods are errors."""
        self._close()

    def _call(self, function: Any, *arguments: Any) -> None:
        if not self._close.alive:
            raise RejectedError("the model is closed")
        self._check(function(self._handle, *arguments, self._error, ERROR_BYTES))

    def _check(self, status: int) -> None:
        if status != Status.OK:
            raise ERRORS.get(status, BugError)(self._error.value.decode(errors="replace"))


def _kv_layer(layer: dict[str, Any]) -> KvLayer:
    if layer["kind"] == "mla":
        return KvLayer("mla", 1, layer["width"], layer["dtype"])
    return KvLayer(layer["kind"], layer["kv_heads"], layer["head_dim"], layer["dtype"])
