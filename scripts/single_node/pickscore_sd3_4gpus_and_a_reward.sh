#!/usr/bin/env bash
# SD3.5-medium on PickScore: 4 GPUs train, a fifth scores while they sample; needs --config.dataset=FOLDER with train.txt and test.txt.
set -e
ROOT="$(dirname "$0")/../.."
python "$ROOT/scripts/serve_reward.py" pickscore --port 18087 --device cuda:4 &
trap 'kill $!' EXIT
until curl --silent --fail http://127.0.0.1:18087/health > /dev/null; do kill -0 $!; sleep 1; done
torchrun --standalone --nproc_per_node=4 "$ROOT/scripts/train_sd3.py" --config config/grpo.py:pickscore_sd3 \
    --config.reward.args="{'pickscore': {'url': 'http://127.0.0.1:18087'}}" "$@"
