"""The kernel's copies between the pools in HBM and its buffers: arbitrary slots, idle rows, three steps in flight."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kda_decode.blocks import Blocks

BUFFERS = 3  # a step's states are read while the step before computes and the one before that is written


def ring(i):
  """The buffer of step (or of row block) i."""
  return jax.lax.rem(i, BUFFERS)


@dataclasses.dataclass(frozen=True)
class Pool:
  """One pool in HBM, its ring of buffers in VMEM and its semaphores.

  Attributes:
    hbm: [layers, slots, ...].
    buffer: [BUFFERS, rows, ...].
    read, write: DMA semaphores [BUFFERS].
  """

  hbm: jax.Array
  buffer: jax.Array
  read: jax.Array
  write: jax.Array


@dataclasses.dataclass(frozen=True)
class SlotCopies:
  """Copies of the slots that a grid step works on.

  The common case, every row active, runs without a branch per row: copies are issued in one straight line, and one
  wait covers a whole buffer, because a DMA semaphore counts bytes. Otherwise loops skip the idle rows.

  Attributes:
    state, conv: the two pools. States move once a step, conv histories once a block of rows.
    layer: the layer's index.
    slots: [B] slots in SMEM.
    count: SMEM [BUFFERS], the number of active rows of the row blocks in flight.
  """

  blocks: Blocks
  state: Pool
  conv: Pool
  layer: jax.Array
  slots: jax.Array
  count: jax.Array

  def row_block(self, step):
    return jax.lax.div(step, self.blocks.head_steps)

  def head_step(self, step):
    return jax.lax.rem(step, self.blocks.head_steps)

  def _slot(self, block, j):
    row = block * self.blocks.rows + j
    # Beyond the batch there is no slot to read.
    return self.slots[jnp.minimum(row, self.blocks.batch - 1) if self.blocks.ragged else row]

  def _validity(self, block, j):
    """Negative for an idle row: its slot or the layer is out of range, or it lies beyond the batch."""
    layers, num_slots = self.state.hbm.shape[:2]
    slot = self._slot(block, j)
    bits = slot | (num_slots - 1 - slot) | self.layer | (layers - 1 - self.layer)
    if self.blocks.ragged:
      bits |= self.blocks.batch - 1 - (block * self.blocks.rows + j)
    return bits

  def active(self, block, j):
    return self._validity(block, j) >= 0

  def all_active(self, block):
    return self.count[ring(block)] == self.blocks.rows

  def count_active(self, block) -> None:
    """Counts a block's active rows, before anything else is asked of the block."""
    rows = self.blocks.rows
    bits = self._validity(block, 0)
    for j in range(1, rows):
      bits |= self._validity(block, j)
    self.count[ring(block)] = rows

    @pl.when(bits < 0)
    def _():
      self.count[ring(block)] = jax.lax.fori_loop(
        0, rows, lambda j, n: n + self.active(block, j).astype(jnp.int32), jnp.int32(0)
      )

  def _state_copy(self, step, j, write: bool):
    heads = pl.ds(self.head_step(step) * self.blocks.head_block, self.blocks.head_block)
    hbm = self.state.hbm.at[self.layer, self._slot(self.row_block(step), j), heads]
    return _copy(self.state, hbm, ring(step), j, write)

  def _conv_copy(self, block, j, write: bool):
    return _copy(self.conv, self.conv.hbm.at[self.layer, self._slot(block, j)], ring(block), j, write)

  def _start(self, block, *copies: Callable) -> None:
    full = self.all_active(block)

    @pl.when(full)
    def _():
      for j in range(self.blocks.rows):
        for copy in copies:
          copy(j).start()

    if self.blocks.rows == 1:
      return

    @pl.when(jnp.logical_not(full))
    def _():
      @pl.loop(0, self.blocks.rows)
      def _(j):
        @pl.when(self.active(block, j))
        def _():
          for copy in copies:
            copy(j).start()

  def _wait(self, block, buffer, semaphore) -> None:
    full = self.all_active(block)

    @pl.when(full)
    def _():
      pltpu.make_async_copy(buffer, buffer, semaphore).wait()

    if self.blocks.rows == 1:
      return

    @pl.when(jnp.logical_not(full))
    def _():
      @pl.loop(0, self.count[ring(block)])
      def _(_):
        pltpu.make_async_copy(buffer.at[0], buffer.at[0], semaphore).wait()

  def start_read(self, step) -> None:
    """Starts a step's reads: its states, and its rows' histories when it's the first step of a block of rows."""
    block = self.row_block(step)
    state = lambda j: self._state_copy(step, j, write=False)
    conv = lambda j: self._conv_copy(block, j, write=False)
    if self.blocks.head_steps == 1:
      self.count_active(block)
      self._start(block, state, conv)
      return

    @pl.when(self.head_step(step) == 0)
    def _():
      self.count_active(block)
      self._start(block, conv)

    self._start(block, state)

  def wait_read_state(self, step) -> None:
    self._wait(self.row_block(step), self.state.buffer.at[ring(step)], self.state.read.at[ring(step)])

  def wait_read_conv(self, block) -> None:
    self._wait(block, self.conv.buffer.at[ring(block)], self.conv.read.at[ring(block)])

  def start_write_state(self, step) -> None:
    self._start(self.row_block(step), lambda j: self._state_copy(step, j, write=True))

  def start_write_conv(self, block) -> None:
    self._start(block, lambda j: self._conv_copy(block, j, write=True))

  def wait_write(self, step) -> None:
    """Waits until a step's states are in HBM, and its rows' histories when it was their last step."""
    block = self.row_block(step)
    self._wait(block, self.state.buffer.at[ring(step)], self.state.write.at[ring(step)])

    @pl.when(self.head_step(step) == self.blocks.head_steps - 1)
    def _():
      self._wait(block, self.conv.buffer.at[ring(block)], self.conv.write.at[ring(block)])


def _copy(pool: Pool, hbm, buffer_index, j, write: bool):
  vmem = pool.buffer.at[buffer_index, j]
  if write:
    return pltpu.make_async_copy(vmem, hbm, pool.write.at[buffer_index])
  return pltpu.make_async_copy(hbm, vmem, pool.read.at[buffer_index])
