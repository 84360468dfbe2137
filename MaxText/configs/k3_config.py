"""`K3Config`: MaxText's configuration with K3's fields, read the way MaxText reads its own."""

import contextlib
import difflib
import glob
import logging
import math
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax
import omegaconf
import yaml
from maxtext.configs import pyconfig
from maxtext.configs.types import MaxTextConfig
from pydantic import Field, model_validator

from MaxText import distributed
from MaxText.configs import hf_config as released
from MaxText.errors import UserError
from MaxText.layers import activations, kda_prefill, moe
from MaxText.progress import say

CONFIG_DIR = os.path.join(os.path.dirname(__file__), "models")

KDA_DECODE_IMPLEMENTATIONS = ("auto", "pallas", "pallas_interpret", "reference")


class K3Config(MaxTextConfig):
  """MaxText's configuration plus what a model of the Kimi K3 family needs. Layer numbers count from one."""

  # Architecture (released name in brackets where it differs)
  hf_config: str = Field("", description="A released config.json (or its directory) that fills the architecture.")
  kda_num_heads: int = Field(0, description="KDA heads [linear_attn_config.num_heads].", ge=0)
  kda_head_dim: int = Field(128, description="Key and value size of a KDA head [linear_attn_config.head_dim].", gt=0)
  kda_short_conv_kernel_size: int = Field(4, description="Taps of KDA's causal convolution.", ge=2)
  kda_gate_lower_bound: float | None = Field(
    None, description="Bound of the log decay [linear_attn_config.gate_lower_bound]; none: softplus decay."
  )
  kda_use_full_rank_gate: bool = Field(False, description="Full-rank output gate of KDA; else low-rank.")
  kda_layers: list[int] = Field([], description="Layers with KDA, counted from one.")
  full_attn_layers: list[int] = Field([], description="Layers with MLA, counted from one.")
  mla_use_nope: bool = Field(True, description="MLA without rotary embedding; the only form that K3 has.")
  mla_use_output_gate: bool = Field(False, description="Sigmoid output gate of MLA.")
  attn_res_block_size: int = Field(0, description="Layers between two snapshots of AttnRes; 0: residuals.", ge=0)
  hidden_act: str = Field("silu", description=f"Activation of all MLPs: {' or '.join(activations.SUPPORTED)}.")
  activation_situ_beta: float = Field(4.0, description="SiTU's clamp of the gate branch.", gt=0)
  activation_situ_linear_beta: float = Field(25.0, description="SiTU's clamp of the up branch.", gt=0)
  routed_expert_hidden_size: int = Field(0, description="Latent size of the routed experts; 0: full width.", ge=0)
  latent_moe_use_norm: bool = Field(False, description="RMSNorm over the summed latent.")
  moe_renormalize: bool = Field(True, description="Chosen experts' weights are divided by their sum.")
  # Implementations
  kda_prefill_implementation: str = Field(
    "auto", description=f"auto, {', '.join(kda_prefill.IMPLEMENTATIONS)} (tokamax's names)."
  )
  kda_decode_implementation: str = Field("auto", description=", ".join(KDA_DECODE_IMPLEMENTATIONS))
  kda_state_dtype: Literal["float32", "bfloat16"] = Field(
    "float32", description="How KDA's state is stored; bfloat16 halves it and drifts (docs/kda_decode.md)."
  )
  grouped_matmul_implementation: str = Field("auto", description=f"auto, {', '.join(moe.GROUPED_MATMULS)}.")
  weight_format: Literal["auto", "plain", "block_fp8", "mxfp4"] = Field(
    "auto",
    description="How the routed experts are held: in weight_dtype, in block-FP8, or packed as released; auto: as a "
    "converted checkpoint holds them, else plain.",
  )
  dense_weight_format: Literal["auto", "plain", "block_fp8"] = Field(
    "auto",
    description="How other large matrices are held; auto: as a converted checkpoint holds them, else plain beside "
    "plain experts and block_fp8 beside others.",
  )
  cpu_threads: int = Field(
    0, description="Threads of a product on a CPU, for the first configuration of a process; 0: one a core.", ge=0
  )
  # Parallelism
  parallel_mode: Literal["latency", "throughput"] = Field(
    "latency", description="Over ici_data_parallelism: the same tokens everywhere, or each group its own."
  )
  mla_cache_mode: Literal["auto", "replicated", "striped"] = Field(
    "auto",
    description="MLA's latents on every device of a tensor group, or dealt out by position; auto: striped where "
    "max_target_length exceeds 4096.",
  )
  mla_cache_dtype: Literal["auto", "float8_e4m3fn"] = Field(
    "auto", description="How MLA's latents are stored: in dtype, or in eight bits (half of bfloat16's memory)."
  )
  latent_projections: Literal["replicated", "sharded"] = Field(
    "replicated", description="The projections around the routed experts: whole on every device, or split over tensor."
  )
  # Planning (plan.py)
  plan_phases: Literal["both", "decode", "prefill", "arithmetic"] = Field(
    "both", description="Programs that plan.py compiles; arithmetic: none of them, so that it answers at once."
  )
  plan_slots: int = Field(0, description="Sequences to plan for; 0: per_device_batch_size times the devices.", ge=0)
  plan_prefill_rows: int = Field(0, description="Sequences that are prefilled at a time; 0: as decode.py does.", ge=0)
  plan_search: bool = Field(False, description="Find the largest prefill chunk and context together, by compiling.")
  plan_search_compiles: int = Field(6, description="Compiles that plan_search may take, minutes each.", gt=0)
  router_weights: Literal["auto", "replicated", "sharded"] = Field(
    "auto",
    description="The router: whole on every device, or split over tensor; auto: split beside split latent projections "
    "and under weight_format=mxfp4.",
  )
  # Decoding
  prompt_file: str = Field("", description="A file with one prompt a line, decoded as one batch.")
  prefill_chunk_size: int = Field(512, description="Tokens of a prompt that are prefilled at a time.", gt=0)
  enable_thinking: bool = Field(True, description="With use_chat_template: let the model think first.")
  decode_steps_per_dispatch: int = Field(32, description="Decode steps in one call of the compiled program.", gt=0)
  decode_sampling_seed: int = Field(0, description="Seed of the sampler.", ge=0, lt=2**32)
  # Serving (serve.py); per_device_batch_size times the devices are the slots
  serve_queue: int = Field(1024, description="Requests that may wait for a slot; more are refused.", gt=0)
  serve_grace_seconds: float = Field(30.0, description="How long running streams may go on after SIGTERM.", ge=0)
  serve_model_name: str = Field("", description="What clients call the model; empty: its checkpoint's folder.")
  serve_host: str = Field("127.0.0.1", description="The address that both faces listen at.")
  serve_http_port: int = Field(8000, description="Of the OpenAI face; 0: any free one, -1: none.", ge=-1, lt=2**16)
  serve_grpc_port: int = Field(9000, description="Of the JetStream face; 0: any free one, -1: none.", ge=-1, lt=2**16)
  serve_api_key_file: str = Field(
    "", description="A file with the key that clients need; or put the key in the environment, as K3_API_KEY."
  )
  serve_request_seconds: float = Field(0.0, description="Longest that a request may take; 0: any time.", ge=0)
  serve_log_prompts: bool = Field(False, description="Write the prompts of HTTP requests to the log.")
  # Scoring
  score_tokens: str = Field("", description="score.py: a .npy file of token ids, int [B, T] or [T].")
  score_output: str = Field("", description="score.py: the .npz file to write `logits` float32 [B, T, V] to.")
  score_mode: Literal["prefill", "decode", "chunked"] = Field("prefill", description="score.py: how to compute them.")

  @model_validator(mode="after")
  def _check_k3(self) -> "K3Config":
    for check in (_check_layers, _check_architecture, _check_parallelism, _check_lengths, _check_sampling):
      check(self)
    return self


def _check_layers(c: K3Config) -> None:
  kda, mla, n = set(c.kda_layers), set(c.full_attn_layers), c.num_decoder_layers
  both = sorted(kda & mla)
  if both or len(kda) + len(mla) != len(c.kda_layers) + len(c.full_attn_layers):
    raise ValueError(f"kda_layers and full_attn_layers name a layer twice{f': {both}' if both else ''}")
  wrong = sorted((kda | mla) - set(range(1, n + 1)))
  if wrong:
    hint = " (they count from one)" if 0 in wrong else ""
    raise ValueError(f"kda_layers/full_attn_layers name layers {wrong} of a model with layers 1..{n}{hint}")
  missing = sorted(set(range(1, n + 1)) - kda - mla)
  if missing:
    raise ValueError(f"layers {missing} are neither in kda_layers nor in full_attn_layers")
  if c.first_num_dense_layers >= n:
    raise ValueError(f"first_num_dense_layers={c.first_num_dense_layers} leaves no MoE layer of {n}")


def _check_architecture(c: K3Config) -> None:
  if c.hidden_act not in activations.SUPPORTED:
    raise ValueError(f"hidden_act={c.hidden_act!r} is unknown; supported: {', '.join(activations.SUPPORTED)}")
  if not c.mla_use_nope:
    raise ValueError("mla_use_nope=false asks for rotary embeddings in MLA, which no model of this family has")
  bound = c.kda_gate_lower_bound
  if bound is None and c.attn_res_block_size and c.kda_use_full_rank_gate:
    raise ValueError(
      "kda_gate_lower_bound is missing: a model with K3's gates (kda_use_full_rank_gate, attn_res_block_size) has a "
      "bounded decay, K3's bound is -5.0"
    )
  if bound is not None and not -5.0 <= bound < 0:
    raise ValueError(f"kda_gate_lower_bound={bound} must lie in [-5, 0)")
  if c.kda_layers and not c.kda_num_heads:
    raise ValueError("kda_num_heads=0, but kda_layers names layers")
  if c.num_kv_heads != c.num_query_heads:
    raise ValueError(f"base_num_kv_heads={c.num_kv_heads} must equal base_num_query_heads={c.num_query_heads} (MLA)")
  if c.num_experts_per_tok > c.num_experts:
    raise ValueError(f"num_experts_per_tok={c.num_experts_per_tok} is more than num_experts={c.num_experts}")
  if c.routed_score_func != "sigmoid":
    raise ValueError(f"routed_score_func={c.routed_score_func!r} is not supported, only 'sigmoid'")
  if c.logits_via_embedding:
    raise ValueError("logits_via_embedding=true (tied embeddings) is not supported: the family has a head of its own")
  if c.latent_moe_use_norm and not c.routed_expert_hidden_size:
    raise ValueError("latent_moe_use_norm=true needs routed_expert_hidden_size")
  if c.kda_decode_implementation not in KDA_DECODE_IMPLEMENTATIONS:
    raise ValueError(
      f"kda_decode_implementation={c.kda_decode_implementation} is unknown; "
      f"choose {', '.join(KDA_DECODE_IMPLEMENTATIONS)}"
    )
  if c.grouped_matmul_implementation not in ("auto", *moe.GROUPED_MATMULS):
    raise ValueError(
      f"grouped_matmul_implementation={c.grouped_matmul_implementation} is unknown; "
      f"choose auto, {', '.join(moe.GROUPED_MATMULS)}"
    )
  if c.kda_prefill_implementation != "auto":
    kda_prefill.check_implementation(c.kda_prefill_implementation, bound)


def _check_parallelism(c: K3Config) -> None:
  ways = c.ici_tensor_parallelism
  for key, heads in (("kda_num_heads", c.kda_num_heads), ("base_num_query_heads", c.num_query_heads)):
    if ways > 1 and heads % ways:
      raise ValueError(f"{key}={heads} can't be split over ici_tensor_parallelism={ways} devices")


def _check_lengths(c: K3Config) -> None:
  if c.max_target_length > c.max_position_embeddings:
    raise ValueError(
      f"max_target_length={c.max_target_length} exceeds the model's max_position_embeddings={c.max_position_embeddings}"
    )
  if not 0 < c.max_prefill_predict_length <= c.max_target_length:
    raise ValueError(
      f"max_prefill_predict_length={c.max_prefill_predict_length} must lie in 1..max_target_length"
      f"={c.max_target_length}"
    )


def _check_sampling(c: K3Config) -> None:
  strategy = c.decode_sampling_strategy.value
  if strategy != "greedy" and not c.decode_sampling_temperature > 0:
    raise ValueError(
      f"decode_sampling_temperature={c.decode_sampling_temperature} must be positive; for the likeliest token use "
      "decode_sampling_strategy=greedy"
    )
  if strategy in ("topk", "composite") and not 0 < c.decode_sampling_top_k <= c.vocab_size:
    raise ValueError(
      f"decode_sampling_strategy={strategy} needs decode_sampling_top_k in 1..{c.vocab_size}, got "
      f"{c.decode_sampling_top_k}"
    )
  if strategy in ("nucleus", "composite") and not 0 < c.decode_sampling_nucleus_p <= 1:
    raise ValueError(
      f"decode_sampling_strategy={strategy} needs decode_sampling_nucleus_p in (0, 1], got "
      f"{c.decode_sampling_nucleus_p}"
    )


def find_config(name: str) -> str:
  """A yml by path, beside the caller, or by bare name among ours.

  Raises:
    UserError: there is none; the message lists ours.
  """
  for candidate in (name, os.path.join(CONFIG_DIR, name)):
    if os.path.isfile(candidate):
      return os.path.abspath(candidate)
  ours = ", ".join(sorted(map(os.path.basename, glob.glob(os.path.join(CONFIG_DIR, "*.yml")))))
  raise UserError(f"no configuration {name!r} here or in {CONFIG_DIR}; there are: {ours}")


def _has_tpu() -> bool:
  """Whether this host has TPU devices, without asking libtpu (which is noisy where there are none)."""
  return bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))


class _ConfigErrors(logging.Filter):
  """Holds back pyconfig's multi-line error report; its text comes out as one line instead."""

  _MARK = "MAXTEXT CONFIG ERROR: "

  def __init__(self):
    super().__init__()
    self.text = ""

  def filter(self, record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if self._MARK in message:
      self.text = message.split(self._MARK, 1)[1]
    return record.levelno >= logging.ERROR and self._MARK not in message and set(message) != {"="}


def _one_line(text: str) -> str:
  """A pydantic report -> its first message, with the field's name."""
  match = re.search(
    r"validation errors? for \w+\n(?:(?P<field>\S+)\n)?"
    r"\s+(?P<message>.*?) \[type=\w+, input_value=(?P<given>.*?), input",
    text,
  )
  if not match:
    return text.splitlines()[0] if text else "the configuration could not be read"
  message = match["message"].removeprefix("Value error, ")
  return f"{match['field']}={match['given'].strip(chr(39))}: {message}" if match["field"] else message


def _check_keys(arguments: Sequence[str]) -> dict[str, str]:
  """Command-line overrides as a dict, after checking that each is a `key=value` of a known key."""
  given = {}
  for argument in arguments:
    key, equals, value = argument.partition("=")
    if not equals:
      raise UserError(f"{argument!r} is not of the form key=value")
    if key not in K3Config.model_fields:
      close = difflib.get_close_matches(key, K3Config.model_fields, n=1)
      raise UserError(f"unknown key {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    given[key] = value
  return given


def _is_text(key: str) -> bool:
  """Whether a key's value is taken as it stands. All others are YAML, to which a prompt with a colon is a mapping."""
  return K3Config.model_fields[key].annotation is str


def _parse(key: str, text: str) -> Any:
  """A command-line value as MaxText reads it; `UserError` where it can't be read."""
  if _is_text(key):
    return text
  try:
    return omegaconf.OmegaConf.from_dotlist([f"{key}={text}"])[key]
  except yaml.YAMLError as error:
    raise UserError(f"{key}={text} can't be read: {getattr(error, 'problem', None) or error}") from error


def _from_release(path: str, given: dict[str, str]) -> dict[str, Any]:
  """Architecture from a released config; contradicting command-line overrides are refused, by both names."""
  values, unknown = released.read(path)
  for key, value in values.items():
    if key in given and _parse(key, given[key]) != value:
      raise UserError(
        f"{key}={given[key]} contradicts {released.release_name(key)}={value} in {released.resolve_path(path)}; "
        "leave one of them out"
      )
  if unknown:
    say(f"{released.resolve_path(path)}: fields unknown here, not used: {', '.join(unknown)}")
  return values


def _in_yml(path: str, key: str) -> Any:
  """A key's value in a yml of ours or in those that it is based on; None where none of them sets it."""
  loaded = omegaconf.OmegaConf.load(path)
  if key in loaded:
    return loaded[key]
  base = os.path.join(os.path.dirname(path), loaded.get("base_config", ""))
  return _in_yml(base, key) if os.path.isfile(base) else None


def _start_jax(argv: Sequence[str]) -> None:
  """What has to be settled before JAX looks for devices: the platform, a CPU's threads, this run's other processes.

  It comes before mistakes in any other keys, which all processes then share.
  """
  given = {key: value for key, _, value in (argument.partition("=") for argument in argv)}
  if given.get("compile_topology"):
    return

  def setting(key: str, default: Any) -> Any:
    if key in given:
      return _parse(key, given[key])
    with contextlib.suppress(UserError, OSError, yaml.YAMLError):  # each is reported when its turn comes
      if len(argv) > 1 and (value := _in_yml(find_config(argv[1]), key)) is not None:
        return value
    return default

  tpu = _has_tpu() and setting("hardware", "tpu") == "tpu"
  if not tpu and not jax.config.jax_platforms:
    jax.config.update("jax_platforms", "cpu")
  threads = setting("cpu_threads", 0)
  if isinstance(threads, int) and threads > 0:
    os.environ["NPROC"] = str(threads)  # where XLA looks; JAX has no option for it
  skip = setting("skip_jax_distributed_system", None)
  if skip is not True:
    timeout = setting("jax_distributed_initialization_timeout", 300)
    distributed.initialize(tpu, asked=skip is False, timeout=timeout if isinstance(timeout, int) else 300)


def initialize(argv: Sequence[str]) -> pyconfig.HyperParameters:
  """Reads a configuration: `argv` = [program, yml, key=value…], as MaxText's own programs take it.

  Returns:
    MaxText's read-only `HyperParameters`, with all fields of `K3Config`.

  Raises:
    UserError: no yml, an unknown key, a value of the wrong type, fields that contradict each other.
  """
  _start_jax(argv)
  if len(argv) < 2 or not argv[1].endswith(".yml"):
    raise UserError(f"usage: {os.path.basename(argv[0]) if argv else 'program'} CONFIG.yml [key=value …]")
  path = find_config(argv[1])
  given = _check_keys(argv[2:])
  # OmegaConf, which carries them, would take ${…} in a text for a reference.
  texts = {key: value.replace("${", "\\${") for key, value in given.items() if _is_text(key)}
  for key, value in given.items():
    _parse(key, value)
  # Values of ours that depend on this host; what a person says wins.
  defaults: dict[str, Any] = {"base_output_directory": "maxtext_output", "log_config": False}
  defaults["skip_jax_distributed_system"] = True  # `_start_jax` has done it
  if not _has_tpu():
    defaults["hardware"] = "cpu"
  if "compile_topology" in given:
    defaults["compile_topology_num_slices"] = 1
  extra = {k: v for k, v in defaults.items() if k not in given}
  if given.get("hf_config"):
    values = _from_release(given["hf_config"], given)
    extra |= values
    # The yml's lengths suit its own model; a smaller model's limit cuts those that nobody asked for.
    for key in ("max_target_length", "max_prefill_predict_length"):
      length = _in_yml(path, key)
      if key not in given and length and length > values["max_position_embeddings"]:
        extra[key] = values["max_position_embeddings"]

  arguments = [argv[0], path, *(f"{key}={value}" for key, value in given.items() if key not in texts)]
  config = _read(arguments, extra | texts)
  if config.ici_tensor_parallelism == -1 and not any(key.startswith("ici_") for key in given):
    # Nobody has said how the devices are laid out: heads over as many as divide them, the rest are data groups.
    devices = config.num_target_devices
    tensor = math.gcd(devices, config.num_query_heads, config.kda_num_heads)
    if tensor < devices:
      mesh = {"ici_tensor_parallelism": tensor, "ici_data_parallelism": devices // tensor}
      config = _read(arguments, extra | texts | mesh)
  return config


def _read(arguments: Sequence[str], values: dict[str, Any]) -> pyconfig.HyperParameters:
  """pyconfig's reading of a configuration, its mistakes as one line."""
  captured = _ConfigErrors()
  handlers = [h for name in (None, "absl") for h in logging.getLogger(name).handlers]
  for handler in handlers:
    handler.addFilter(captured)
  try:
    return pyconfig.initialize(list(arguments), config_class=K3Config, **values)
  except SystemExit as error:
    raise UserError(_one_line(captured.text)) from error
  except (ValueError, TypeError, OSError) as error:  # under pytest MaxText re-raises instead of exiting
    raise UserError(_one_line(str(error))) from error
  finally:
    for handler in handlers:
      handler.removeFilter(captured)
