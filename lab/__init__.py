"""What extends the method: every setting, environment at scale, control, report and measurement."""
