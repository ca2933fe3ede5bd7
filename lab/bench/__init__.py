"""Programs that measure, or that disturb a run: `bash run.sh bench`, `python lab/bench/NAME.py`."""
