"""The paper's baselines that are not settings of the loop: RFT and DART, PPO, chat endpoints."""
