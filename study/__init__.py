"""Many runs: methods x seeds and one report; runs compared, their trajectories side by side."""
