"""JetStream's engine contract over our engine: for whoever drives engines with JetStream's own orchestrator.

Our server doesn't come this way: it has a core of its own (MaxText/inference/serving). The contract is that of 0.2.2
together with what 0.3.0 adds. They differ in who hands out a prompt's first token: 0.3.0's prefill returns it beside
the prefix; under 0.2.2 the first `generate` after an insert does.

A prefix is our `DecodeState` of one slot (one for each data group, all alike), its first token already chosen.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from MaxText.configs.model_config import ModelConfig
from MaxText.errors import UserError
from MaxText.inference import cache as slots_of
from MaxText.inference import steps
from MaxText.inference.cache import cache_specs
from MaxText.inference.engine import Engine
from MaxText.inference.jetstream.compat import engine_api, token_utils, tokenizer_api, tokenizer_pb2, version
from MaxText.inference.sampling import Sampling
from MaxText.inference.steps import DecodeState
from MaxText.inference.tokenizer import K3Tokenizer

# The lengths to which JetStream pads a prompt; its max_prefill_length must be one of them.
_SMALLEST, _LARGEST = 16, 32768


class SlotStates(NamedTuple):
  """What JetStream carries from step to step. B slots.

  Attributes:
    decode: ours.
    fresh: [B] bool, slots whose last token was chosen by prefill and hasn't been handed out.
    generated: [B] int32, tokens handed out.
  """

  decode: DecodeState
  fresh: jax.Array
  generated: jax.Array


def _rows_of(decode: DecodeState) -> DecodeState:
  """The same without its cache: arrays with one entry a slot."""
  return decode._replace(cache=())


def _insert(
  cfg: ModelConfig, first_is_ours: bool, prefix: DecodeState, states: SlotStates, slot: jax.Array
) -> SlotStates:
  """Row 0 of a prefix into a slot, which is counted over all data groups: the one that has it takes its own row."""
  here = len(states.fresh)
  slot -= cfg.parallel.first_slot(here)

  def put(states: SlotStates) -> SlotStates:
    decode = jax.tree.map(lambda old, new: old.at[slot].set(new[0]), _rows_of(states.decode), _rows_of(prefix))
    decode = decode._replace(cache=slots_of.insert(prefix.cache, 0, states.decode.cache, slot))
    generated = 0 if first_is_ours else 1
    return SlotStates(decode, states.fresh.at[slot].set(first_is_ours), states.generated.at[slot].set(generated))

  return jax.lax.cond((slot >= 0) & (slot < here), put, lambda states: states, states)


def _generate(
  cfg: ModelConfig, stop_ids: tuple[int, ...], params: dict[str, Any], states: SlotStates
) -> tuple[jax.Array, SlotStates]:
  """One step; a fresh slot hands out the token it has and rests.

  Returns:
    ([B, 3] int32: token, whether there is one, tokens so far; states).
  """
  decode, fresh, generated = states
  working = decode._replace(active=decode.active & ~fresh)
  chosen, stepped = steps.generate(cfg, stop_ids, 1, params, working, jnp.int32(1), jnp.zeros_like(fresh))
  tokens = jnp.where(fresh, decode.tokens, chosen.tokens[0])
  stepped = stepped._replace(active=jnp.where(fresh, decode.active, stepped.active))
  valid = tokens >= 0
  generated += valid
  data = jnp.stack([jnp.where(valid, tokens, 0), valid.astype(jnp.int32), generated], axis=1)
  return data, SlotStates(stepped, jnp.zeros_like(fresh), generated)


class JetStreamTokenizer(tokenizer_api.Tokenizer):
  """K3's tokenizer as JetStream's orchestrator uses one. Nothing is put before a text, whatever it asks for."""

  def __init__(self, tokenizer: K3Tokenizer):
    self._tokenizer = tokenizer

  def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
    """A text's ids, padded to one of JetStream's lengths; `is_bos` is passed over, since K3 has no BOS."""
    kwargs.pop("is_bos", None)
    return token_utils.pad_tokens(
      np.array(self._tokenizer.encode(s), np.int32), self.bos_id, self.pad_id, is_bos=False, **kwargs
    )

  def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str:
    """Text of some ids.

    The orchestrator decodes ids one by one and joins only bytes that are spelt like "<0xE5>". A token that is one byte
    of a longer character comes in that form; one of two or three such bytes can't be told, and is U+FFFD. Our own
    service has neither limit.
    """
    if len(token_ids) == 1:
      data = b"" if self._tokenizer.is_special(token_ids[0]) else self._tokenizer.token_bytes(token_ids[0])
      if len(data) == 1 and data >= b"\x80":
        return f"<0x{data[0]:02X}>"
    return self._tokenizer.decode(token_ids)

  @property
  def pad_id(self) -> int:
    return self._tokenizer.pad_id

  @property
  def eos_id(self) -> int:
    return self._tokenizer.eos_id

  @property
  def bos_id(self) -> int:
    """[BOS], which JetStream puts before ids of a client; `K3Engine.prefill` takes it away."""
    return self._tokenizer.bos_id

  @property
  def stop_tokens(self) -> set[int]:
    return set(self._tokenizer.stop_ids)


class K3Engine(engine_api.Engine):
  """JetStream's `Engine`. Its functions may be called from several threads, as JetStream's driver does."""

  def __init__(
    self, engine: Engine, tokenizer: K3Tokenizer, slots: int, max_length: int, max_prefill: int, api: str | None = None
  ):
    """Wraps an engine.

    Args:
      slots: sequences that are decoded at once.
      max_length: tokens of a prompt and its answer together.
      max_prefill: tokens of a prompt; cut to a length that JetStream pads to.
      api: the version whose contract is kept, "0.2" or "0.3"; None: that of the installed package.

    Raises:
      UserError: max_prefill is below the smallest of JetStream's lengths.
    """
    if max_prefill < _SMALLEST:
      raise UserError(f"max_prefill_predict_length={max_prefill} is below {_SMALLEST}, JetStream's shortest prompt")
    api = api or version().rpartition(".")[0]
    if api not in ("0.2", "0.3"):
      raise UserError(f"JetStream's engine contract of version {api} is unknown; there are 0.2 and 0.3")
    self._engine, self._tokenizer, self._slots, self._max_length = engine, tokenizer, slots, max_length
    self._max_prefill = min(_LARGEST, 1 << (max_prefill.bit_length() - 1))
    self._prefill_returns_token = api == "0.3"

    cache, rows = cache_specs(engine.cfg), engine.row_spec
    decode = DecodeState(cache, rows, rows, rows, Sampling(*(rows for _ in Sampling())), rows, rows)
    states = SlotStates(decode, rows, rows)
    self._copy = engine.program(partial(jax.tree.map, jnp.copy), (cache,), cache, donate=())
    self._insert = engine.program(
      partial(_insert, engine.cfg, not self._prefill_returns_token), (decode, states, P()), states, donate=(1,)
    )
    self._generate = engine.program(
      partial(_generate, engine.cfg, engine.stop_ids), (engine.weight_specs, states), (rows, states), donate=(1,)
    )

  def load_params(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The weights, which the engine has already read."""
    return self._engine.params

  def prefill(
    self,
    *,
    params: Any,
    existing_prefix: DecodeState | None = None,
    padded_tokens: Any,
    true_length: int,
    sampler: Any = None,
    request_id: Any = None,
  ) -> Any:
    """Feeds a prompt, or what follows a prefix, and chooses the token after it.

    Args:
      existing_prefix: what came before; it stays as it is. It can be continued, not cut.
      padded_tokens: ids, padded behind.
      true_length: how many of them count.

    Returns:
      The prefix; for 0.3 (prefix, ResultTokens of the first token).

    Raises:
      UserError: no ids, ids that the model lacks, or more than fit.
    """
    self._check(params, sampler)
    ids = self._prompt(np.asarray(padded_tokens), true_length)
    groups = self._engine.groups
    if existing_prefix is None:
      before, cache = 0, self._engine.init_cache(groups, self._max_length)
    else:
      before, cache = int(existing_prefix.cache.lengths[0]), self._copy(existing_prefix.cache)
    left = self._max_length - before - len(ids)
    if left < 1:
      raise UserError(
        f"a prompt of {before + len(ids)} tokens leaves no room for an answer: max_target_length={self._max_length}"
      )
    logits, cache = self._engine.prefill([ids] * groups, cache)
    prefix = self._engine.start(logits, cache, np.full(groups, left))
    if not self._prefill_returns_token:
      return prefix
    token = prefix.tokens[:1, None]
    return prefix, _result(jnp.concatenate([jnp.maximum(token, 0), token >= 0, jnp.ones_like(token)], axis=1))

  def prefill_multisampling(self, *, num_samples: int = 1, **kwargs: Any) -> Any:
    """0.3's prefill for several samples of a prompt; a slot here holds one.

    Raises:
      NotImplementedError: more than one is asked for.
    """
    if num_samples != 1:
      raise NotImplementedError(
        f"prefill_multisampling with num_samples={num_samples} is not supported: samples_per_slot is 1"
      )
    return self.prefill(**kwargs)

  def insert(self, prefix: DecodeState, decode_state: SlotStates, slot: int, request_id: Any = None) -> SlotStates:
    """Puts a prefix into a slot. The state given is donated, the prefix isn't.

    Raises:
      UserError: there is no such slot.
    """
    if not 0 <= slot < self._slots:
      raise UserError(f"slot {slot} must lie in 0..{self._slots - 1}")
    return self._insert(prefix, decode_state, np.int32(slot))

  def bulk_insert(self, prefix: DecodeState, decode_state: SlotStates, slots: Sequence[int]) -> SlotStates:
    """0.3's insert of one prefix into several slots."""
    for slot in slots:
      decode_state = self.insert(prefix, decode_state, slot)
    return decode_state

  def generate(self, params: Any, decode_state: SlotStates, sampler: Any = None) -> tuple[SlotStates, Any]:
    """The next token of every slot; one that has ended, or was never used, has none. The state given is donated."""
    self._check(params, sampler)
    data, decode_state = self._generate(self._engine.params, decode_state)
    return decode_state, _result(data)

  def init_decode_state(self, *args: Any, **kwargs: Any) -> SlotStates:
    """A state in which every slot is free."""
    decode = self._engine.idle(self._engine.init_cache(self._slots, self._max_length))
    zeros = np.zeros(self._slots)
    return SlotStates(decode, self._engine.place_rows(zeros, np.bool_), self._engine.place_rows(zeros))

  def free_resource(self, slot: int) -> None:
    """0.3 calls it when a request is over; a slot owns nothing that insert doesn't replace."""

  def get_prefix_destination_sharding(self) -> DecodeState:
    return jax.tree.map(lambda a: a.sharding, self._engine.abstract_state(self._engine.groups, self._max_length))

  def get_tokenizer(self) -> Any:
    return tokenizer_pb2.TokenizerParameters(extra_ids=0)

  def build_tokenizer(self, metadata: Any) -> JetStreamTokenizer:
    """Ours, whatever the parameters say."""
    return JetStreamTokenizer(self._tokenizer)

  @property
  def max_concurrent_decodes(self) -> int:
    return self._slots

  @property
  def samples_per_slot(self) -> int:
    return 1

  @property
  def max_prefill_length(self) -> int:
    return self._max_prefill

  @property
  def use_chunked_prefill(self) -> bool:
    """Whether the orchestrator has to cut prompts; `prefill` does that itself."""
    return False

  @property
  def prefill_chunk_size(self) -> int:
    return self._engine.chunk_size

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return self._engine.mesh

  @property
  def colocated_cpus(self) -> None:
    return None

  def _check(self, params: Any, sampler: Any) -> None:
    if params is not self._engine.params:
      raise UserError("an engine runs its own weights: pass what its load_params returned")
    if sampler is not None:
      raise NotImplementedError("a sampler of the caller's is not supported: set the decode_sampling_* keys")

  def _prompt(self, padded: np.ndarray, true_length: int) -> list[int]:
    """Checked ids of a prompt, without the [BOS] that JetStream puts before a client's ids."""
    if not 0 < true_length <= len(padded) or len(padded) > self._max_prefill:
      raise UserError(f"a prompt of {true_length} tokens must lie in 1..{self._max_prefill} (max_prefill_length)")
    ids = padded[:true_length].tolist()
    if ids[0] == self._tokenizer.bos_id:
      ids = ids[1:]
    if not ids:
      raise UserError("the prompt is empty")
    wrong = next((i for i in ids if not 0 <= i < self._engine.cfg.vocab_size), None)
    if wrong is not None:
      raise UserError(f"token id {wrong} must lie in 0..{self._engine.cfg.vocab_size - 1}")
    return ids


def _result(data: jax.Array) -> Any:
  """[B, 3] int32 -> JetStream's `ResultTokens`."""
  return engine_api.ResultTokens(data=data, tokens_idx=(0, 1), valid_idx=(1, 2), length_idx=(2, 3), samples_per_slot=1)
