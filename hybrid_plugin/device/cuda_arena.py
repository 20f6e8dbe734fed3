# SPDX-License-Identifier: Apache-2.0
"""GPU memory that comes and goes, by the CUDA driver's virtual memory API.

Source: CUDA driver API, "Virtual Memory Management" (cuMemAddressReserve,
cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap), through NVIDIA's
cuda-bindings, so that there is nothing to compile.

Each block is one physical allocation of its own, and can back any address.
Behind all holes lies one and the same block, read-only: a kernel that looks at
an unmapped page reads garbage, one that writes there fails with an illegal
address.
"""

from __future__ import annotations

from typing import Any

import torch

from hybrid_plugin.device.virtual_arena import AddressRange, VirtualArena


def is_available() -> bool:
    """Whether cuda-bindings is installed and there is a GPU."""
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available()


class CudaError(RuntimeError):
    """A call of the driver failed, and not for want of memory."""


class CudaArena(VirtualArena):
    """Blocks of one GPU's memory."""

    clears = False

    def __init__(
        self, budget: int, device: torch.device, block_bytes: int | None = None
    ) -> None:
        """Take the block behind holes, and no other memory yet.

        Args:
            budget: bytes that may be held, the block behind holes included.
            device: a CUDA device.
            block_bytes: a multiple of the driver's granularity; by default that.

        Raises:
            ValueError: for sizes that do not fit.
            MemoryError: if there is not even memory for one block.
        """
        from cuda.bindings import driver

        torch.empty(1, device=device)  # makes the device's context
        self._driver: Any = driver
        self._device = device
        self._properties = self._describe_blocks()
        granularity = int(
            self._call(
                "cuMemGetAllocationGranularity",
                self._properties,
                driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
        )
        block_bytes = block_bytes or granularity
        if block_bytes % granularity:
            raise ValueError(
                f"blocks of {block_bytes} bytes are no multiple of the driver's "
                f"{granularity}"
            )
        super().__init__(budget, block_bytes)
        self._free: list[Any] = []
        """Handles that back nothing."""
        self._behind: dict[int, Any] = {}
        """Handle behind each mapped block, by address."""
        count, reason = self._create(1)
        if not count:
            raise MemoryError(f"there is no GPU memory for one block: {reason}")
        self._dummy: Any = self._free.pop()

    # --------------------------------------------------------------- addresses

    def _reserve(self, size: int) -> torch.Tensor:
        error, base = self._driver.cuMemAddressReserve(size, self.block_bytes, 0, 0)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise MemoryError(f"no addresses for {size} bytes: {self._name(error)}")
        address = int(base)
        self._fill_holes(address, size)
        return torch.as_tensor(_Bytes(address, size), device=self._device)

    def _release(self, reserved: AddressRange) -> None:
        self._call("cuMemUnmap", reserved.address, reserved.size)
        self._call("cuMemAddressFree", reserved.address, reserved.size)

    def close(self) -> None:
        """Give the block behind holes back, too."""
        super().close()
        if self._dummy is not None:
            self._call("cuMemRelease", self._dummy)
            self._dummy = None

    # ------------------------------------------------------------------ memory

    def _create(self, blocks: int) -> tuple[int, str]:
        create = self._driver.cuMemCreate
        success = self._driver.CUresult.CUDA_SUCCESS
        for count in range(blocks):
            error, handle = create(self.block_bytes, self._properties, 0)
            if error != success:
                return count, self._name(error)
            self._free.append(handle)
        return blocks, ""

    def _destroy(self, blocks: int) -> None:
        for _ in range(blocks):
            self._call("cuMemRelease", self._free.pop())

    def _attach(self, address: int, size: int) -> str | None:
        self._call("cuMemUnmap", address, size)
        addresses = range(address, address + size, self.block_bytes)
        for done, block in enumerate(addresses):
            handle = self._free.pop()
            error = self._driver.cuMemMap(block, self.block_bytes, 0, handle, 0)[0]
            if error != self._driver.CUresult.CUDA_SUCCESS:
                self._free.append(handle)
                self._take_back(addresses[:done])
                self._fill_holes(address, size)
                return self._name(error)
            self._behind[block] = handle
        self._allow(address, size, writing=True)
        return None

    def _detach(self, address: int, size: int) -> None:
        self._take_back(range(address, address + size, self.block_bytes))
        self._fill_holes(address, size)

    def _wait(self) -> None:
        if self.waits_for_stream:
            torch.cuda.current_stream(self._device).synchronize()
        else:
            torch.cuda.synchronize(self._device)

    # ---------------------------------------------------------------- internal

    def _take_back(self, addresses: range) -> None:
        """Unmap blocks that lie one behind the other, and keep their handles."""
        if addresses:
            size = len(addresses) * self.block_bytes
            self._call("cuMemUnmap", addresses[0], size)
            self._free += [self._behind.pop(address) for address in addresses]

    def _fill_holes(self, address: int, size: int) -> None:
        """Put the dummy block behind addresses that have nothing behind them."""
        map_block, dummy = self._driver.cuMemMap, self._dummy
        success = self._driver.CUresult.CUDA_SUCCESS
        for block in range(address, address + size, self.block_bytes):
            error = map_block(block, self.block_bytes, 0, dummy, 0)[0]
            if error != success:
                raise CudaError(f"cuMemMap failed: {self._name(error)}")
        self._allow(address, size, writing=False)

    def _allow(self, address: int, size: int, *, writing: bool) -> None:
        flags = self._driver.CUmemAccess_flags
        access = self._driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writing
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        self._call("cuMemSetAccess", address, size, [access], 1)

    def _describe_blocks(self) -> Any:
        properties = self._driver.CUmemAllocationProp()
        properties.type = self._driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = (
            self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        )
        properties.location.id = torch.cuda._utils._get_device_index(self._device, True)
        return properties

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; returns its result, if it has one."""
        error, *result = getattr(self._driver, name)(*arguments)
        if error != self._driver.CUresult.CUDA_SUCCESS:
            raise CudaError(f"{name} failed: {self._name(error)}")
        return result[0] if result else None

    def _name(self, error: Any) -> str:
        return str(getattr(error, "name", error))


class _Bytes:
    """Device memory as torch takes it without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|i1",
            "data": (address, False),
            "version": 3,
        }
