"""Ready pipelines, to run and to copy: `python -m dags.NAME`."""
