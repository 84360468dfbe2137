"""What the planner's tests share."""

from MaxText.configs.k3_config import initialize
from MaxText.planning.assemble import Plan

ON_64 = ("compile_topology=tpu7x-64", "ici_tensor_parallelism=32", "ici_data_parallelism=2")
THROUGHPUT = ("parallel_mode=throughput", "mla_cache_mode=striped")
FP8_ON_64 = ("kimi-k3.yml", *ON_64, *THROUGHPUT, "weight_format=block_fp8")
MXFP4_ON_32 = ("kimi-k3.yml", "compile_topology=tpu7x-32", *THROUGHPUT, "weight_format=mxfp4")


def planned(*argv):
  """The plan of a configuration, compiled as it says."""
  plan = Plan(initialize(["plan.py", *argv]))
  plan.run(lambda line: None)
  return plan.plan
