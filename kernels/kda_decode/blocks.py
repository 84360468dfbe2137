"""How the kernel cuts a batch into grid steps, and what it can't cut."""

import dataclasses

GROUP = 8  # sublanes of a float32 register
MAX_STATES = 96  # states a grid step: 6 MiB of float32, three buffers of which stay below VMEM's default limit
MANY_HEADS = 16
MAX_HEADS = 96  # all heads of K3; more don't fit VMEM


@dataclasses.dataclass(frozen=True)
class Blocks:
  """A grid step takes `rows` batch rows and `head_block` heads of each; the heads of a row are adjacent steps."""

  batch: int
  heads: int
  rows: int
  head_block: int

  @property
  def head_steps(self) -> int:
    return self.heads // self.head_block

  @property
  def steps(self) -> int:
    return -(-self.batch // self.rows) * self.head_steps

  @property
  def padded_rows(self) -> int:
    return -(-self.rows // GROUP) * GROUP

  @property
  def padded_heads(self) -> int:
    return -(-self.heads // GROUP) * GROUP

  @property
  def ragged(self) -> bool:
    """Whether the last block has rows beyond the batch."""
    return self.batch % self.rows != 0


def choose_blocks(batch: int, heads: int) -> Blocks:
  """The cut for a batch and a device's heads.

  A grid step costs several hundred cycles whatever it does, and a state's transfer 67, so a step should hold 48
  states or more. A short batch rather wants several steps, so that reads, arithmetic and writes overlap.
  """
  rows = min(batch, GROUP)
  for limit, min_steps in ((MAX_STATES // 2, 4), (MAX_STATES, 8)):
    while rows >= GROUP and 2 * rows * heads <= limit and 2 * rows * min_steps <= batch:
      rows *= 2
  divisors = [d for d in range(1, heads + 1) if heads % d == 0]
  # What a step keeps for all heads of its rows grows with them, and takes VMEM from the states.
  limit = MAX_STATES if heads <= MANY_HEADS else MAX_STATES // 2
  head_block = max((d for d in divisors if d * rows <= limit), default=1)
  return Blocks(batch, heads, rows, head_block)


def check_supported(heads: int, key_dim: int, interpret: bool) -> None:
  """Raises ValueError for a head size or a number of heads that the kernel can't take. Any batch is supported."""
  if heads > MAX_HEADS:
    raise ValueError(
      f"kda_decode: the Pallas kernel was asked for {heads} heads on one device. It supports up to {MAX_HEADS}: split"
      " the heads over devices with jax.shard_map, or use implementation='reference'."
    )
  if interpret and key_dim % 32 == 0:
    return
  if key_dim != 128:
    raise ValueError(
      f"kda_decode: the Pallas kernel was asked for K = V = {key_dim}. It supports K = V = 128 on a TPU, and"
      " multiples of 32 when interpreted. Use implementation='reference' for other sizes."
    )
