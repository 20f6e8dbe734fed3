# SPDX-License-Identifier: Apache-2.0
"""NIXL: reads memory of another machine into memory of this one.

One agent serves a rank.  The host memory is registered with it once, and never any
memory of the device: elastic pools are mapped memory, which NIXL reads far more slowly.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol
from uuid import uuid4

from hybrid_plugin.errors import ConfigError
from hybrid_plugin.tiers.bundle_file import Rows
from hybrid_plugin.tiers.failure import Failure, Reason
from hybrid_plugin.tiers.peers.channel import PeerError
from hybrid_plugin.tiers.peers.ranges import Range, ranges_of

_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
"""The library's package by the CUDA that it was built for; none needs a GPU."""
_NETLINK = "libnl-route-3.so.200"
"""The system's library that `_keep_netlink_apart` loads."""
_DEVICES = "UCX_NET_DEVICES"
"""Environment variable: on which network devices UCX listens and connects."""
_MALFORMED = ("nixlNotFoundError", "nixlInvalidParamError", "nixlMismatchError")
"""What NIXL raises of metadata and ranges that make no sense; the peer may be well."""
_SHORTEST_NAP, _LONGEST_NAP = 5e-5, 5e-3
"""Seconds between two looks at a transfer."""


class DataPlane(Protocol):
    """Reads the memory of peers."""

    @property
    def metadata(self) -> bytes:
        """What a peer needs to read the registered memory of this process."""

    @property
    def region(self) -> Range:
        """The registered memory."""

    def scratch(self, rows: Rows) -> Any:
        """A context within which other memory is registered, too."""

    def read(
        self,
        metadata: bytes,
        theirs: Sequence[Range],
        own: Sequence[Range],
        meanwhile: Callable[[], None],
    ) -> Failure | None:
        """Fill own memory; when it returns, nothing touches that any more.

        Args:
            metadata: of the peer.
            theirs: ranges of its registered memory.
            own: ranges of registered memory, as many and of the same sizes.
            meanwhile: called now and then; what it raises ends the read as soon as that
                can be.
        """

    def stop(self) -> None:
        """Have reads end early, from any thread."""

    def close(self) -> None:
        """Let go of the memory; nobody reads any more."""


def is_installed() -> bool:
    """Whether NIXL is there, without loading it."""
    return any(importlib.util.find_spec(name) is not None for name in _PACKAGES)


def library() -> ModuleType:
    """NIXL's Python interface.

    Raises:
        ConfigError: if it is not installed.
    """
    _keep_netlink_apart()
    for name in _PACKAGES:
        try:
            return importlib.import_module(f"{name}._api")
        except ImportError:
            continue
    raise ConfigError(
        "peers need NVIDIA's NIXL, which is not installed: pip install nixl-cu12, or "
        "nixl-cu13 with CUDA 13; or leave peers out."
    )


def _keep_netlink_apart() -> None:
    """Load the system's libnl-route before NIXL brings its own.

    Symptom: where RDMA drivers are installed (Debian's libibverbs1), every process that
    has made an agent dies of SIGSEGV when it exits, after all of its work.
    Cause: NIXL's wheels (seen in 1.5.1) bring a copy of libnl-route under another name.
    UCX's module for EFA loads the system's libefa and with that the system's
    libnl-route, whose functions then are the copy's: both share one list, and take
    themselves out of it after the other is gone.
    Fix: a library that was loaded before the copy uses its own functions.
    Delete when `tests/device/test_peers_nixl.py` passes without it, RDMA drivers
    installed.
    """
    with contextlib.suppress(OSError):  # not installed: nothing can load it
        ctypes.CDLL(_NETLINK)


class NixlAgent:
    """A `DataPlane` of NIXL over UCX."""

    def __init__(self, region: Range, *, loopback: bool) -> None:
        """Register memory.

        Args:
            region: host memory, which stays where it is until `close`.
            loopback: whether only processes of this machine are to reach it; UCX
                listens on all addresses otherwise, or on what UCX_NET_DEVICES says.

        Raises:
            ConfigError: if NIXL is not installed, or refuses.
        """
        api = library()
        self._errors: tuple[type[Exception], ...] = _errors_of(api)
        self.region = region
        self._closing = False
        self._peers: dict[bytes, str] = {}
        """Names of peers by their metadata."""
        self._turn = threading.Lock()
        """Held while the agent is called.  It serves one thread at a time, and others
        wait inside of it, with Python's lock: so would the engine's thread."""
        config = api.nixl_agent_config(
            backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        try:
            self._agent: Any = api.nixl_agent(uuid4().hex, config)
            with _devices("lo" if loopback else None):
                self._agent.create_backend("UCX")
            self._memory = self._register([region])
        except self._errors as error:
            raise ConfigError(
                f"peers cannot use NIXL ({error}): leave peers out, or see its log."
            ) from error
        self.metadata: bytes = self._agent.get_agent_metadata()

    @contextmanager
    def scratch(self, rows: Rows) -> Iterator[None]:
        """See `DataPlane.scratch`."""
        with self._turn:
            memory = self._register(ranges_of(rows))
        try:
            yield
        finally:
            with self._turn:
                self._agent.deregister_memory(memory)

    def read(
        self,
        metadata: bytes,
        theirs: Sequence[Range],
        own: Sequence[Range],
        meanwhile: Callable[[], None],
    ) -> Failure | None:
        """See `DataPlane.read`."""
        try:
            places = self._places(own), self._places(theirs)
            with self._turn:
                name = self._meet(metadata)
                handle = self._agent.initialize_xfer("READ", *places, name)
        except self._errors as error:
            return self._lost(metadata, error)
        return self._run(handle, metadata, meanwhile)

    def stop(self) -> None:
        """See `DataPlane.stop`."""
        self._closing = True

    def close(self) -> None:
        """See `DataPlane.close`."""
        self._agent.deregister_memory(self._memory)
        self._agent = None

    # ---------------------------------------------------------------- internal

    def _run(
        self, handle: Any, metadata: bytes, meanwhile: Callable[[], None]
    ) -> Failure | None:
        """Transfer, and wait until it is over, whatever happens meanwhile."""
        ended: Failure | None = None
        nap = _SHORTEST_NAP
        try:
            with self._turn:
                state = self._agent.transfer(handle)
            while state == "PROC":
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
                if ended is None:
                    ended = _failure_of(meanwhile)
                if self._closing:
                    break
                with self._turn:
                    state = self._agent.check_xfer_state(handle)
            with self._turn:
                self._agent.release_xfer_handle(handle)
        except self._errors as error:
            return self._lost(metadata, error)
        if state != "DONE":
            return ended or Failure(Reason.PEER_GONE, f"the transfer is {state}")
        return ended

    def _lost(self, metadata: bytes, error: Exception) -> Failure:
        if type(error).__name__ in _MALFORMED:
            return Failure(Reason.PEER_MALFORMED, str(error))
        self._forget(metadata)
        return Failure(Reason.PEER_GONE, str(error))

    def _register(self, ranges: Sequence[Range]) -> Any:
        listed = [(address, size, 0, "") for address, size in ranges]
        return self._agent.register_memory(listed, mem_type="DRAM")

    def _places(self, ranges: Sequence[Range]) -> Any:
        listed = [(address, size, 0) for address, size in ranges]
        return self._agent.get_xfer_descs(listed, mem_type="DRAM")

    def _meet(self, metadata: bytes) -> str:
        if metadata not in self._peers:
            found = self._agent.add_remote_agent(metadata)
            name = found.decode() if isinstance(found, bytes) else str(found)
            self._peers[metadata] = name
        return self._peers[metadata]

    def _forget(self, metadata: bytes) -> None:
        """Have the next read meet a peer anew."""
        with self._turn:
            name = self._peers.pop(metadata, None)
            if name is not None:
                with contextlib.suppress(*self._errors):  # it is gone
                    self._agent.remove_remote_agent(name)


def _failure_of(meanwhile: Callable[[], None]) -> Failure | None:
    try:
        meanwhile()
    except PeerError as error:
        return error.failure
    return None


def _errors_of(api: ModuleType) -> tuple[type[Exception], ...]:
    """All kinds of errors that NIXL raises; they have no base of their own."""
    bindings = api.nixlBind
    found = [one for name, one in vars(bindings).items() if name.endswith("Error")]
    return tuple(one for one in found if issubclass(one, Exception))


@contextmanager
def _devices(name: str | None) -> Iterator[None]:
    """Have UCX use a network device, where the environment names none."""
    if name is None or _DEVICES in os.environ:
        yield
        return
    os.environ[_DEVICES] = name
    try:
        yield
    finally:
        del os.environ[_DEVICES]
