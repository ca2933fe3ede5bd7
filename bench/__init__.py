"""Programs that measure, or that disturb a run: `bash run.sh bench`, `python bench/NAME.py`."""
