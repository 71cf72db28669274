"""The folder of a model that a host names by path or by repository."""

from pathlib import Path


def model_folder(model: str, revision: str | None, download_dir: str | None) -> Path:
    """Returns the folder, which is downloaded if `model` names a repository of the Hugging Face hub."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        model,
        revision=revision,
        cache_dir=download_dir,
        allow_patterns=["*.safetensors", "*.json"],
        ignore_patterns=["original/*"],
    )
    return Path(folder)
