//! Environment variables that GPU drivers read. The caller of this crate passes their values; the crate
//! itself reads no environment variables.

use std::path::PathBuf;

use protocol::DeviceKind;

/// Environment variables that GPU drivers read. The drivers apply the visible-device variables themselves;
/// the executor only quotes these variables in error messages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceEnvironment {
    /// `ROCM_PATH`: ROCm installation folder. ROCm libraries are searched first in its `lib` subfolder.
    pub rocm_path: Option<PathBuf>,
    /// `ROCR_VISIBLE_DEVICES`: GPUs visible to ROCr, the AMD runtime below HIP. An empty value hides all
    /// GPUs.
    pub rocr_visible_devices: Option<String>,
    /// `HIP_VISIBLE_DEVICES`: indices of the GPUs visible to HIP, among the GPUs visible to ROCr.
    pub hip_visible_devices: Option<String>,
    /// `CUDA_VISIBLE_DEVICES`: GPUs visible to CUDA. HIP applies this variable if `HIP_VISIBLE_DEVICES` is
    /// unset or empty.
    pub cuda_visible_devices: Option<String>,
}

impl DeviceEnvironment {
    /// Returns the folders in which device libraries are searched first.
    #[must_use]
    pub fn library_folders(&self, device: DeviceKind) -> Vec<PathBuf> {
        let rocm = self.rocm_path.iter().filter(|_| device == DeviceKind::Rocm);
        rocm.map(|path| path.join("lib")).collect()
    }

    /// Returns the variables that restrict the visible devices, as `NAME=VALUE` separated by spaces; empty if
    /// no such variable is set.
    #[must_use]
    pub fn visibility(&self, device: DeviceKind) -> String {
        let set = |name: &str, value: &Option<String>| {
            value.as_ref().filter(|value| !value.is_empty()).map(|value| format!("{name}={value}"))
        };
        let rocr = self.rocr_visible_devices.as_ref();
        let rocr = rocr.map(|value| format!("ROCR_VISIBLE_DEVICES={value}"));
        let hip = set("HIP_VISIBLE_DEVICES", &self.hip_visible_devices);
        let cuda = set("CUDA_VISIBLE_DEVICES", &self.cuda_visible_devices);
        let variables = match device {
            DeviceKind::Cpu => [None, None],
            DeviceKind::Cuda => [None, cuda],
            DeviceKind::Rocm => [rocr, hip.or(cuda)],
        };
        variables.into_iter().flatten().collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visibility_names_the_variables_of_the_driver() {
        let text = |text: &str| Some(text.to_owned());
        let all = DeviceEnvironment {
            rocm_path: Some("/rocm".into()),
            rocr_visible_devices: text("2,3"),
            hip_visible_devices: text("1"),
            cuda_visible_devices: text("0"),
        };
        assert_eq!(
            all.visibility(DeviceKind::Rocm),
            "ROCR_VISIBLE_DEVICES=2,3 HIP_VISIBLE_DEVICES=1"
        );
        assert_eq!(all.visibility(DeviceKind::Cuda), "CUDA_VISIBLE_DEVICES=0");
        assert_eq!(all.visibility(DeviceKind::Cpu), "");
        let fallback = DeviceEnvironment {
            hip_visible_devices: text(""),
            rocr_visible_devices: text(""),
            ..all
        };
        assert_eq!(
            fallback.visibility(DeviceKind::Rocm),
            "ROCR_VISIBLE_DEVICES= CUDA_VISIBLE_DEVICES=0",
            "an empty ROCR_VISIBLE_DEVICES hides all devices, an empty HIP_VISIBLE_DEVICES none"
        );
        assert_eq!(fallback.library_folders(DeviceKind::Rocm), [PathBuf::from("/rocm/lib")]);
        assert!(fallback.library_folders(DeviceKind::Cuda).is_empty());
    }
}
