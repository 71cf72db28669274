//! Safetensors files of a model folder: the files are opened, mapped into memory and checked against the
//! index.
//!
//! The folder is untrusted input: pickle files are not read, no code is executed, and file names in the index
//! must not point outside of the folder. Symbolic links in the folder are followed, because download caches
//! consist of links; the user is responsible for their targets.

use super::header::{self, SafetensorsHeaderError, StoredTensor};
use crate::ModelLoadError;
use crate::error::{StoredTensorError, WeightFileError};
use crate::foreign_formats::folder_format_hint;
use ops::MappedFile;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// All tensors in the safetensors files of a folder, with the files mapped into memory.
#[derive(Debug)]
pub(crate) struct SafetensorsCheckpoint {
    pub(crate) dir: PathBuf,
    files: Vec<CheckpointFile>,
    tensors: BTreeMap<String, (usize, StoredTensor)>,
    /// Original name of each renamed tensor, by new name.
    stored_names: BTreeMap<String, String>,
}

/// Safetensors file of a checkpoint, mapped into memory.
#[derive(Debug)]
struct CheckpointFile {
    path: PathBuf,
    map: MappedFile,
}

impl SafetensorsCheckpoint {
    /// Maps the files into memory and checks all headers; reads no weights.
    pub(crate) fn open(dir: &Path) -> Result<Self, ModelLoadError> {
        let mut checkpoint = Self {
            dir: dir.to_owned(),
            files: Vec::new(),
            tensors: BTreeMap::new(),
            stored_names: BTreeMap::new(),
        };
        let index = dir.join(INDEX_FILE);
        if index.exists() {
            checkpoint.add_indexed(&index)?;
        } else if dir.join(SINGLE_FILE).exists() {
            checkpoint.add(SINGLE_FILE)?;
        } else {
            return Err(ModelLoadError::NoWeights {
                dir: dir.to_owned(),
                hint: folder_format_hint(dir),
            });
        }
        Ok(checkpoint)
    }

    /// Names of all tensors in the safetensors files.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Renames every tensor to `canonical(name)`.
    ///
    /// Errors: two tensors have the same new name.
    pub(crate) fn rename(
        &mut self,
        canonical: impl Fn(&str) -> String,
    ) -> Result<(), ModelLoadError> {
        for (stored, tensor) in std::mem::take(&mut self.tensors) {
            let name = canonical(&stored);
            if self.tensors.contains_key(&name) {
                let other = self.stored_name(&name).to_owned();
                let path = self.files[tensor.0].path.clone();
                let fault = StoredTensorError::OtherSpelling(other);
                return Err(ModelLoadError::Tensor { path, tensor: stored, fault });
            }
            if name != stored {
                self.stored_names.insert(name.clone(), stored);
            }
            self.tensors.insert(name, tensor);
        }
        Ok(())
    }

    /// Name that the tensor `name` has in its file.
    pub(crate) fn stored_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.stored_names.get(name).map_or(name, String::as_str)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.get(name).map(|(_, stored)| stored)
    }

    /// All bytes of the stored tensor `name`.
    pub(crate) fn bytes(&self, name: &str) -> Option<&[u8]> {
        let (file, stored) = self.tensors.get(name)?;
        Some(&self.files[*file].map[stored.bytes.clone()])
    }

    /// Creates an error about the stored tensor `name`, with the path of its file.
    pub(crate) fn fault(&self, name: &str, fault: StoredTensorError) -> ModelLoadError {
        let file = self.tensors.get(name).map(|(file, _)| &self.files[*file].path);
        let path = file.unwrap_or(&self.dir).clone();
        ModelLoadError::Tensor { path, tensor: self.stored_name(name).to_owned(), fault }
    }

    fn add_indexed(&mut self, index: &Path) -> Result<(), ModelLoadError> {
        let index_files = read_index(index)?;
        let mut names: Vec<&str> = index_files.values().map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        for name in names {
            self.add(name)?;
        }
        for (tensor, file) in &index_files {
            let path = self.tensors.get(tensor).map(|(index, _)| &self.files[*index].path);
            if path != Some(&self.dir.join(file)) {
                let (path, tensor) = (self.dir.join(file), tensor.clone());
                return Err(ModelLoadError::Tensor {
                    path,
                    tensor,
                    fault: StoredTensorError::NotInFile,
                });
            }
        }
        match self.tensors.keys().find(|tensor| !index_files.contains_key(*tensor)) {
            Some(tensor) => {
                let fault = StoredTensorError::NotInIndex("does not contain it".to_owned());
                Err(self.fault(tensor, fault))
            }
            None => Ok(()),
        }
    }

    fn add(&mut self, name: &str) -> Result<(), ModelLoadError> {
        let path = self.dir.join(name);
        let map = MappedFile::open(&path)
            .map_err(|error| ModelLoadError::Io { path: path.clone(), error })?;
        let tensors = stored(&path, &map)?;
        let file = self.files.len();
        self.files.push(CheckpointFile { path: path.clone(), map });
        for (tensor, stored) in tensors {
            if let Some((first, _)) = self.tensors.get(&tensor) {
                let other = self.files[*first].path.display().to_string();
                return Err(ModelLoadError::Tensor {
                    path,
                    tensor,
                    fault: StoredTensorError::Duplicate { other },
                });
            }
            self.tensors.insert(tensor, (file, stored));
        }
        Ok(())
    }
}

/// Tensors that the header of a safetensors file lists; `path` is used in error messages.
fn stored(path: &Path, file: &[u8]) -> Result<Vec<(String, StoredTensor)>, ModelLoadError> {
    header::parse(file).map_err(|fault| match fault {
        SafetensorsHeaderError::File(fault) => {
            ModelLoadError::File { path: path.to_owned(), fault }
        }
        SafetensorsHeaderError::Tensor(tensor, fault) => {
            ModelLoadError::Tensor { path: path.to_owned(), tensor, fault }
        }
    })
}

/// Names and byte ranges of the tensors in the safetensors file `file`; `path` is used in error messages.
///
/// Errors: the header is invalid or contradicts the size of the file.
pub fn tensor_locations(
    path: &Path,
    file: &[u8],
) -> Result<Vec<(String, Range<usize>)>, ModelLoadError> {
    let location = |(name, stored): (String, StoredTensor)| (name, stored.bytes);
    Ok(stored(path, file)?.into_iter().map(location).collect())
}

/// Paths of the weight files of a folder, including the index file. Only the index file is opened.
pub(crate) fn weight_files(dir: &Path) -> Result<Vec<PathBuf>, ModelLoadError> {
    let (index, single) = (dir.join(INDEX_FILE), dir.join(SINGLE_FILE));
    if index.exists() {
        let mut files: Vec<PathBuf> =
            read_index(&index)?.values().map(|name| dir.join(name)).collect();
        files.push(index);
        files.sort_unstable();
        files.dedup();
        Ok(files)
    } else if single.exists() {
        Ok(vec![single])
    } else {
        Err(ModelLoadError::NoWeights { dir: dir.to_owned(), hint: folder_format_hint(dir) })
    }
}

/// Reads the index file: the file name of each tensor, by tensor name.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>, ModelLoadError> {
    /// Contents of the index file (`model.safetensors.index.json`): the file name of each tensor, by tensor
    /// name.
    #[derive(serde::Deserialize)]
    struct WeightMapIndex {
        weight_map: BTreeMap<String, String>,
    }
    let text =
        fs::read(path).map_err(|error| ModelLoadError::Io { path: path.to_owned(), error })?;
    let fault = |fault| ModelLoadError::File { path: path.to_owned(), fault };
    let index: WeightMapIndex = serde_json::from_slice(&text)
        .map_err(|e| fault(WeightFileError::Index { detail: e.to_string() }))?;
    for name in index.weight_map.values() {
        let plain = Path::new(name).file_name().is_some_and(|f| f == name.as_str());
        if !plain || name.contains(['/', '\\', '\0']) {
            return Err(fault(WeightFileError::Outside { name: name.clone() }));
        }
    }
    Ok(index.weight_map)
}
