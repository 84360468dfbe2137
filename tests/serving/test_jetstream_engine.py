"""JetStream's engine contract: its own driver and orchestrator on the tiny model, and 0.3.0's calls by hand."""

import asyncio
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from MaxText.configs.k3_config import initialize
from MaxText.errors import UserError
from MaxText.inference.engine import checkpoint_directory, load_engine
from MaxText.inference.jetstream import compat
from MaxText.inference.jetstream.engine import JetStreamTokenizer, K3Engine
from MaxText.inference.steps import NO_TOKEN
from MaxText.inference.tokenizer import K3Tokenizer

ROOT = os.path.join(os.path.dirname(__file__), "..", "..")
sys.path.insert(0, os.path.join(ROOT, "scripts"))
import tiny_facts  # noqa: E402

MAX_LENGTH = 64
FACTS = tiny_facts.facts()[::6]

# What 0.3.0's engine has, by its public source; 0.2.2's is asked of the package itself.
MEMBERS_OF_0_3 = (
  "bulk_insert", "build_tokenizer", "colocated_cpus", "free_resource", "generate", "get_prefix_destination_sharding",
  "get_tokenizer", "init_decode_state", "insert", "load_params", "max_concurrent_decodes", "max_prefill_length", "mesh",
  "prefill", "prefill_chunk_size", "prefill_multisampling", "samples_per_slot", "use_chunked_prefill",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
  return K3Tokenizer.from_directory(checkpoint_directory(initialize(["test", "kimi-k3-tiny.yml"])))


@pytest.fixture(scope="module")
def ours(tokenizer):
  config = initialize(["test", "kimi-k3-tiny.yml", "decode_steps_per_dispatch=8"])
  return load_engine(config, tokenizer.stop_ids, 4, MAX_LENGTH)


@pytest.fixture(scope="module")
def engines(ours, tokenizer):
  """The engine under each version's contract."""
  return {api: K3Engine(ours, tokenizer, 4, MAX_LENGTH, 40, api) for api in ("0.2", "0.3")}


@pytest.fixture(scope="module")
def expected(ours, tokenizer):
  """Greedy ids after each fact's prompt, one at a time, by the engine that decode.py runs; the stop id last."""

  def generate(prompt):
    logits, cache = ours.prefill([prompt], ours.init_cache(1, MAX_LENGTH))
    state = ours.start(logits, cache, np.array([MAX_LENGTH - len(prompt)]))
    ids = [int(state.tokens[0])]
    while np.any(state.active):
      tokens, state = ours.generate(state)
      ids += [int(t) for t in np.asarray(tokens)[:, 0] if t != NO_TOKEN]
    return ids

  return [generate(tokenizer.encode(f.prompt)) for f in FACTS]


def text_of(tokenizer, ids):
  return tokenizer.decode([i for i in ids if i not in tokenizer.stop_ids])


def test_every_member_of_both_versions_is_there(engines, ours):
  assert not K3Engine.__abstractmethods__
  for name in (*compat.engine_api.Engine.__abstractmethods__, *MEMBERS_OF_0_3):
    assert hasattr(engines["0.2"], name), name
  engine = engines["0.2"]
  assert engine.max_prefill_length == 32  # 40, cut to a length that JetStream pads to
  assert (engine.max_concurrent_decodes, engine.samples_per_slot, engine.colocated_cpus) == (4, 1, None)
  assert isinstance(engine.mesh, jax.sharding.Mesh)
  assert (engine.use_chunked_prefill, engine.prefill_chunk_size) == (False, ours.chunk_size)


def test_the_installed_version_chooses_the_contract(ours, tokenizer):
  engine = K3Engine(ours, tokenizer, 4, MAX_LENGTH, 32)
  prefix = engine.prefill(params=ours.params, padded_tokens=np.arange(16), true_length=3)
  assert int(prefix.cache.lengths[0]) == 3


def drive(engine, requests, interleaved):
  """Requests through JetStream's own Driver and LLMOrchestrator, all at once -> (text, ids) of each."""
  orchestrator = compat.load_orchestrator()

  async def one(service, request):
    text, ids = "", []
    async for response in service.Decode(request):
      (sample,) = response.stream_content.samples
      text += sample.text
      ids += sample.token_ids
    return text, ids

  async def main():
    params = [engine.load_params()]
    driver = orchestrator.Driver([engine], [engine], params, params, interleaved_mode=interleaved)
    try:
      service = orchestrator.LLMOrchestrator(driver)
      async with asyncio.timeout(120):
        return await asyncio.gather(*(one(service, r) for r in requests))
    finally:
      await asyncio.to_thread(driver.stop)

  return asyncio.run(main())


@pytest.mark.parametrize("interleaved", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_jetstreams_own_orchestrator_gets_the_same_text(interleaved, engines, tokenizer, expected):
  Decode = compat.jetstream_pb2.DecodeRequest
  requests = [Decode(text_content=Decode.TextContent(text=f.prompt), max_tokens=30) for f in FACTS]
  # Ids get a [BOS] from the orchestrator, which must not reach the model.
  requests += [
    Decode(token_content=Decode.TokenContent(token_ids=tokenizer.encode(f.prompt)), max_tokens=30) for f in FACTS[:3]
  ]
  requests.append(Decode(text_content=Decode.TextContent(text=FACTS[0].prompt), max_tokens=2))
  answers = drive(engines["0.2"], requests, interleaved)
  n = len(FACTS)
  assert [text for text, _ in answers[:n]] == [text_of(tokenizer, ids) for ids in expected]
  assert [ids for _, ids in answers[:n]] == [ids[:-1] for ids in expected]
  assert answers[n : n + 3] == [("", ids[:-1]) for ids in expected[:3]]
  assert answers[-1][1] == expected[0][:2]


def test_the_contract_of_0_3(engines, ours, tokenizer, expected):
  """prefill hands out the first token, and one prefix fills several slots; a slot that joins moves no other."""
  engine, params = engines["0.3"], ours.params
  prompts = [JetStreamTokenizer(tokenizer).encode(f.prompt, is_bos=True, max_prefill_length=32) for f in FACTS[:2]]
  prefixes, first = zip(
    *(engine.prefill(params=params, padded_tokens=p, true_length=n) for p, n in prompts), strict=True
  )
  ids = {slot: [] for slot in range(4)}

  def take(slot, row):
    token, valid, length = np.asarray(row)
    if valid:
      ids[slot].append(int(token))
      assert length == len(ids[slot])

  state = engine.bulk_insert(prefixes[0], engine.init_decode_state(), [2, 0])
  for slot in (2, 0):
    take(slot, first[0].data[0])
  for step in range(30):
    if step == 1:
      state = engine.insert(prefixes[1], state, slot=3)
      take(3, first[1].data[0])
    state, result = engine.generate(params, state)
    assert len(jax.tree.leaves(result)) == 1
    host = result.convert_to_numpy()
    for slot in range(4):
      data = host.get_result_at_slot(slot)
      take(slot, (data.tokens[0, 0], data.valid[0, 0], data.lengths[0]))
  assert ids == {0: expected[0], 1: [], 2: expected[0], 3: expected[1]}


def test_a_prefix_is_continued_as_if_it_had_come_at_once_and_stays_as_it_was(engines, ours, tokenizer, expected):
  engine, params = engines["0.3"], ours.params
  prompt = tokenizer.encode(FACTS[0].prompt)
  half = len(prompt) // 2

  def prefill(ids, before=None):
    padded = np.pad(ids, (0, 32 - len(ids)))
    return engine.prefill(params=params, padded_tokens=padded, true_length=len(ids), existing_prefix=before)

  begun, _ = prefill(prompt[:half])
  for _ in range(2):
    whole, first = prefill(prompt[half:], begun)
    assert int(whole.cache.lengths[0]) == len(prompt)
    assert int(first.data[0, 0]) == expected[0][0]
  state = engine.insert(whole, engine.init_decode_state(), 1)
  got = [int(first.data[0, 0])]
  for _ in range(len(expected[0]) - 1):
    state, result = engine.generate(params, state)
    got.append(int(result.data[1, 0]))
  assert got == expected[0]


def test_what_can_not_be_done_is_said(engines, ours, tokenizer):
  engine = engines["0.2"]

  def prefill(padded=16, n=3, token=1, **kwargs):
    padded_tokens = np.full(padded, token)
    return engine.prefill(**{"params": ours.params, "padded_tokens": padded_tokens, "true_length": n} | kwargs)

  for words, call in {
    "a prompt of 40 tokens must lie in 1..32": lambda: prefill(32, 40),  # as the orchestrator passes a longer one
    "a prompt of 0 tokens": lambda: prefill(n=0),
    "the prompt is empty": lambda: prefill(n=1, token=tokenizer.bos_id),
    "token id 608 must lie in 0..607": lambda: prefill(token=608),
    "token id -1 must lie": lambda: prefill(token=-1),
    "its own weights": lambda: prefill(params={}),
    "leaves no room": lambda: prefill(32, 32, existing_prefix=prefill(32, 32)),
    "slot 4 must lie in 0..3": lambda: engine.insert(None, None, 4),
    "is below 16": lambda: K3Engine(ours, tokenizer, 4, MAX_LENGTH, 15),
    "version 0.9 is unknown": lambda: K3Engine(ours, tokenizer, 4, MAX_LENGTH, 32, "0.9"),
  }.items():
    with pytest.raises(UserError, match=words):
      call()
  with pytest.raises(NotImplementedError, match="num_samples=2"):
    engine.prefill_multisampling(params=ours.params, padded_tokens=np.ones(16), true_length=3, num_samples=2)
  with pytest.raises(NotImplementedError, match="sampler"):
    prefill(sampler=max)


def test_tokens_one_by_one_join_to_characters_where_jetstream_can(tokenizer):
  mine = JetStreamTokenizer(tokenizer)
  ids = tokenizer.encode("é🦊 北")
  assert compat.token_utils.text_tokens_to_str([mine.decode([i]) for i in ids]) == "é🦊 北"
  assert mine.stop_tokens == tokenizer.stop_ids
  padded, n = mine.encode("é🦊 北", is_bos=True, max_prefill_length=32)
  assert (padded[:n].tolist(), len(padded)) == (ids, 16 if n <= 16 else 32)  # nothing before it


@pytest.mark.slow
def test_two_data_groups_with_slots_of_their_own():
  """Prefixes are there in every group; each slot is filled in its own."""
  code = """
import numpy as np
from MaxText.configs.k3_config import initialize
from MaxText.inference.engine import checkpoint_directory, load_engine
from MaxText.inference.jetstream.engine import K3Engine
from MaxText.inference.tokenizer import K3Tokenizer
config = initialize(["test", "kimi-k3-tiny.yml", "ici_data_parallelism=2", "parallel_mode=throughput"])
tokenizer = K3Tokenizer.from_directory(checkpoint_directory(config))
engine = K3Engine(load_engine(config, tokenizer.stop_ids, 4, 64), tokenizer, 4, 64, 32)
params, state, ids = engine.load_params(), engine.init_decode_state(), {1: [], 2: []}
for slot, text in ((1, "The capital of France is"), (2, "The capital of Japan is")):
  prompt = tokenizer.encode(text)
  prefix = engine.prefill(params=params, padded_tokens=np.pad(prompt, (0, 32 - len(prompt))), true_length=len(prompt))
  state = engine.insert(prefix, state, slot)
for _ in range(16):
  state, result = engine.generate(params, state)
  for slot in ids:
    token, valid, _ = np.asarray(result.data)[slot]
    ids[slot] += [int(token)] if valid and token not in tokenizer.stop_ids else []
print([tokenizer.decode(x) for x in ids.values()])
"""
  environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", code]
  result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=ROOT, env=environment)
  assert result.stdout.splitlines()[-1:] == ["[' Paris.', ' Tokyo.']"], result.stderr
