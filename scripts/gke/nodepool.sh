#!/usr/bin/env bash
# A node pool for one v7x slice of 32 chips (8 hosts of 4), which is there when something waits for it.
# Not run on hardware.
#
# PROJECT=… REGION=us-central1 ZONE=us-central1-c CLUSTER=… ./nodepool.sh
#
# Wants a Standard cluster of GKE 1.34.0-gke.2201000 or later, with Workload Identity and the Cloud Storage FUSE driver.
set -euo pipefail
: "${PROJECT:?}" "${REGION:?}" "${ZONE:?}" "${CLUSTER:?}"

POOL="${POOL:-kimi-k3-v7x}" # serve.yaml selects it by this name
TOPOLOGY=2x4x4
HOSTS=8

# v7x takes its topology from a workload policy, in place of the --tpu-topology of other TPUs.
gcloud compute resource-policies create workload-policy "$POOL" \
  --project="$PROJECT" --region="$REGION" \
  --type=HIGH_THROUGHPUT --accelerator-topology="$TOPOLOGY"

# Flex-start waits in a queue for capacity, and gives it back after seven days at the latest. Such a pool has to begin
# empty and to be scaled: by --max-nodes, a zone's limit, since a slice comes whole.
gcloud container node-pools create "$POOL" \
  --project="$PROJECT" --location="$REGION" --node-locations="$ZONE" --cluster="$CLUSTER" \
  --machine-type=tpu7x-standard-4t --placement-policy="$POOL" \
  --flex-start --reservation-affinity=none \
  --enable-autoscaling --num-nodes=0 --min-nodes=0 --max-nodes="$HOSTS" --location-policy=ANY \
  --disk-type=hyperdisk-balanced --disk-size=200 \
  --workload-metadata=GKE_METADATA --scopes=cloud-platform
