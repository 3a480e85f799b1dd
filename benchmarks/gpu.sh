#!/usr/bin/env bash
# All that is worth doing on a machine with a GPU, in one call:
#
#   benchmarks/gpu.sh [FOLDER [PART ...]]      parts: build tests memcheck racecheck operators floor steps; all by default
#
# builds the kernels in place for the GPU at hand, runs the tests of CUDA, runs some of them under compute-sanitizer,
# times every operator beside its floor and whole steps beside ordinary ones and peers. Results go to FOLDER (by default
# benchmarks/results): gpu.json, gpu_steps/MODEL, and gpu.log with all that was printed. A part that fails is named at
# the end, and the others run all the same.
#
# It takes the Python on PATH, with a torch that has CUDA and the packages of `pip install .[test]`; Opacus if it is
# there. Nothing is downloaded.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-benchmarks/results}
wanted=" ${*:2} "
mkdir -p "$folder"
exec > >(tee "$folder/gpu.log") 2>&1

failed=()
part() {
  local name=$1
  shift
  [[ $wanted =~ ^\ *$ || $wanted == *" $name "* ]] || return 0
  echo "== $name: $*"
  local start=$SECONDS
  "$@" || failed+=("$name")
  echo "== $name: $((SECONDS - start)) s"
}

nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv
capability=$(python3 -c 'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))') || exit 1
export TORCH_CUDA_ARCH_LIST=$capability DPKERNELS_CUDA=1

part build python3 setup.py --quiet build_ext --inplace
part tests python3 -m pytest -q -p no:cacheprovider tests/cuda
for tool in memcheck racecheck; do
  part "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 \
    python3 -m pytest -q -p no:cacheprovider tests/cuda/test_noise.py tests/cuda/test_clipping.py \
    -k "streams or (layers and (2-D or positions or tokens or group))"
done
part operators python3 -m benchmarks.gpu --out "$folder/gpu.json"
part floor python3 -m benchmarks.floor --measured "$folder/gpu.json"

# Large batches, as benchmarks/floor.py has them, so that kernels and not launches are measured.
for step in mnist_cnn:4096 cifar10_cnn:2048 scatternet_linear:8192 scatternet_cnn:4096 resnet18:1024 resnet50:256; do
  model=${step%:*} batch=${step#*:}
  part steps python3 -m dpkernels bench --device cuda --models "$model" --batch "$batch" --seconds 3 \
    --out "$folder/gpu_steps/$model"
done

if ((${#failed[@]})); then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "everything passed"
