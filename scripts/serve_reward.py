"""Serve a reward file over HTTP, to runs on this machine or others.

    python scripts/serve_reward.py pickscore --port 18087 --device cuda:0

A run uses it with --config.reward.args="{'pickscore': {'url': 'http://127.0.0.1:18087'}}"; see
docs/howto/reward_servers.md.
"""

from flow_grpo.reward_server.serve import main
from flow_grpo.settings.command_line import sentences

if __name__ == "__main__":
    with sentences():
        main()
