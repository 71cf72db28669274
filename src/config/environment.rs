//! Environment variables that configure the process. Only this file reads them, once at start-up.

use std::path::{Path, PathBuf};

use engine::nodes::ClusterSecret;
use executor::DeviceEnvironment;

use super::cluster::{LauncherEnvVariables, SECRET_VARIABLE};

/// Values of the environment variables that configure the process.
#[derive(Debug, Clone, Default)]
pub struct ProcessEnvironment {
    /// Root of the hub cache: `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`.
    pub hub_cache: Option<PathBuf>,
    /// `HF_ENDPOINT`: URL of the hub, instead of `https://huggingface.co`.
    pub hub_endpoint: Option<String>,
    /// `HF_TOKEN`, else the content of `HF_HOME/token`: access token of the hub.
    pub hub_token: Option<String>,
    /// `HF_HUB_OFFLINE`: use cached files only, without requests to the hub.
    pub hub_offline: bool,
    /// Cache folder of compiled kernels: `XDG_CACHE_HOME/hadron`, else `~/.cache/hadron`.
    pub kernel_cache: Option<PathBuf>,
    /// `ROCM_PATH` and the variables that restrict the visible GPUs.
    pub devices: DeviceEnvironment,
    /// `RUST_LOG`: log filter.
    pub log: Option<String>,
    /// `HADRON_API_KEY`, else `VLLM_API_KEY`: API key of clients and, without `--api-key`, of the server.
    pub api_key: Option<String>,
    /// `POD_NAME`, else the host name: it replaces `{pod}` in topics of KV events.
    pub pod_name: Option<String>,
    /// `HADRON_CLUSTER_SECRET`: secret that the nodes of a cluster share.
    pub cluster_secret: Option<ClusterSecret>,
    /// Variables that Slurm, MPI, torchrun and LeaderWorkerSet set on the nodes that they start.
    pub cluster: LauncherEnvVariables,
}

impl ProcessEnvironment {
    /// Reads the environment of the process.
    #[allow(clippy::disallowed_methods)] // Only this function reads environment variables.
    pub fn from_process() -> Self {
        let text = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let cache = text("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| text("HOME").map(|home| PathBuf::from(home).join(".cache")));
        let home = text("HF_HOME").map(PathBuf::from);
        let home = home.or_else(|| cache.as_ref().map(|cache| cache.join("huggingface")));
        let token = text("HF_TOKEN").or_else(|| read_trimmed(&home.as_ref()?.join("token")));
        let hub_cache = text("HF_HUB_CACHE").map(PathBuf::from);
        Self {
            hub_cache: hub_cache.or_else(|| home.map(|home| home.join("hub"))),
            hub_endpoint: text("HF_ENDPOINT"),
            hub_token: token,
            hub_offline: text("HF_HUB_OFFLINE").is_some_and(|value| value != "0"),
            kernel_cache: cache.map(|cache| cache.join("hadron")),
            devices: DeviceEnvironment {
                rocm_path: text("ROCM_PATH").map(PathBuf::from),
                // An empty value is kept, because it hides all devices.
                rocr_visible_devices: std::env::var("ROCR_VISIBLE_DEVICES").ok(),
                hip_visible_devices: text("HIP_VISIBLE_DEVICES"),
                cuda_visible_devices: text("CUDA_VISIBLE_DEVICES"),
            },
            log: text("RUST_LOG"),
            api_key: text("HADRON_API_KEY").or_else(|| text("VLLM_API_KEY")),
            pod_name: text("POD_NAME").or_else(host_name),
            cluster_secret: text(SECRET_VARIABLE).map(|text| ClusterSecret::new(&text)),
            cluster: LauncherEnvVariables::read(text),
        }
    }
}

/// Returns the host name, which in a container is the name of the pod.
fn host_name() -> Option<String> {
    read_trimmed(Path::new("/proc/sys/kernel/hostname"))
}

/// Returns the text of a file without leading and trailing whitespace; `None` if the file cannot be read or
/// contains no text.
fn read_trimmed(file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}
