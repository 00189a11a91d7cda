"""Reinforcement learning and preference optimisation for flow-matching image models."""
