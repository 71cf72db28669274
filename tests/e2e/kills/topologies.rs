//! Models and parallel topologies of a kill test, and the outputs that undisturbed servers give.

use crate::http::executor_process::body;
use crate::http::parallel_ranks::with_experts;
use crate::http::server_process::ServerProcess;
use crate::http_client::post;
use serde_json::{Value, json};

/// Length of the longest output in tokens.
const TOKENS: u32 = 500;
/// Number of distinct requests to a model.
const REQUESTS: u32 = 6;
const EXACT: &[&str] = &["--dtype", "float32"];

/// Device that the executors of a kill test run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KillTestDevice {
    /// One CPU thread per executor.
    Cpu,
    /// One NVIDIA GPU per executor.
    Cuda,
    /// One AMD GPU per executor.
    Rocm,
}

impl KillTestDevice {
    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Cpu => &["--threads", "1"],
            Self::Cuda => &["--device", "cuda", "--num-gpu-blocks-override", "1024"],
            Self::Rocm => &["--device", "rocm", "--num-gpu-blocks-override", "1024"],
        }
    }
}

/// Number and parallelism of a server's executors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum KillTestTopology {
    One,
    TensorParallel2,
    DataParallel2,
    DpAttention2Experts2,
    TensorParallel4,
    DataParallel2TensorParallel2,
    DpAttention4Experts4,
}

impl KillTestTopology {
    const OF_TWO: &[Self] =
        &[Self::One, Self::TensorParallel2, Self::DataParallel2, Self::DpAttention2Experts2];
    const OF_FOUR: &[Self] =
        &[Self::DataParallel2TensorParallel2, Self::DpAttention4Experts4, Self::TensorParallel4];

    /// Topologies for a number of devices.
    pub(super) fn for_devices(devices: u64) -> &'static [Self] {
        match devices {
            2 => Self::OF_TWO,
            4 => Self::OF_FOUR,
            other => panic!("no topologies for {other} devices, only for two and four"),
        }
    }

    /// Name of the topology in the printed tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::One => "one executor",
            Self::TensorParallel2 => "TP 2",
            Self::DataParallel2 => "DP 2",
            Self::DpAttention2Experts2 => "DP attention 2 + EP 2",
            Self::TensorParallel4 => "TP 4",
            Self::DataParallel2TensorParallel2 => "DP 2 of TP 2",
            Self::DpAttention4Experts4 => "DP attention 4 + EP 4",
        }
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::One => &["--executor", "process"],
            Self::TensorParallel2 => &["-tp", "2"],
            Self::DataParallel2 => &["-dp", "2"],
            Self::DpAttention2Experts2 => &["-dp", "2", "--enable-expert-parallel"],
            Self::TensorParallel4 => &["-tp", "4"],
            Self::DataParallel2TensorParallel2 => &["-dp", "2", "-tp", "2"],
            Self::DpAttention4Experts4 => &["-dp", "4", "--enable-expert-parallel"],
        }
    }

    /// Groups of ranks that fail as a unit, each with the replica that the server's log names for it.
    pub(super) fn groups(self) -> &'static [(u16, &'static [u16])] {
        match self {
            Self::One => &[(0, &[0])],
            Self::TensorParallel2 | Self::DpAttention2Experts2 => &[(0, &[0, 1])],
            Self::DataParallel2 => &[(0, &[0]), (1, &[1])],
            Self::TensorParallel4 | Self::DpAttention4Experts4 => &[(0, &[0, 1, 2, 3])],
            Self::DataParallel2TensorParallel2 => &[(0, &[0, 1]), (1, &[2, 3])],
        }
    }

    fn has_experts(self) -> bool {
        matches!(self, Self::DpAttention2Experts2 | Self::DpAttention4Experts4)
    }
}

/// A request with its expected output token ids.
#[derive(Debug, Clone)]
pub(super) struct RecordedRequest {
    pub(super) body: Value,
    pub(super) ids: Vec<u32>,
}

/// The models of a kill test and their requests with expected outputs.
pub(super) struct KillTestModels {
    device: KillTestDevice,
    expert_model: tempfile::TempDir,
    demo_requests: Vec<RecordedRequest>,
    expert_requests: Vec<RecordedRequest>,
}

impl KillTestModels {
    /// Writes the models and records their outputs on undisturbed servers.
    pub(super) fn prepare(device: KillTestDevice) -> Self {
        let experts = with_experts();
        let mut models = Self {
            device,
            expert_model: experts,
            demo_requests: Vec::new(),
            expert_requests: Vec::new(),
        };
        models.demo_requests = known_requests(&models.model_flags(KillTestTopology::One));
        models.expert_requests =
            known_requests(&models.model_flags(KillTestTopology::DpAttention2Experts2));
        models
    }

    pub(super) fn requests(&self, topology: KillTestTopology) -> &[RecordedRequest] {
        if topology.has_experts() { &self.expert_requests } else { &self.demo_requests }
    }

    fn model_flags(&self, topology: KillTestTopology) -> Vec<String> {
        let folder = self.expert_model.path().join("model").to_str().unwrap().to_owned();
        let mut sizes = vec!["--max-model-len", "4096"];
        if self.device == KillTestDevice::Cpu {
            sizes.extend(["--num-gpu-blocks-override", "1024"]);
        }
        let model = topology.has_experts().then_some(folder).into_iter();
        let sizes = sizes.into_iter().filter(|_| topology.has_experts());
        let exact = EXACT.iter().chain(self.device.flags()).copied();
        model.chain(sizes.chain(exact).map(str::to_owned)).collect()
    }

    /// Arguments of `hadron serve` for a topology.
    pub(super) fn flags(&self, topology: KillTestTopology) -> Vec<String> {
        let mut flags = self.model_flags(topology);
        flags.extend(topology.flags().iter().map(|&flag| flag.to_owned()));
        flags
    }
}

/// Records the outputs of greedy and sampled requests. In sampled requests, a lost or repeated token changes
/// all later tokens.
fn known_requests(flags: &[String]) -> Vec<RecordedRequest> {
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let server = ServerProcess::start(&flags);
    let record = |which: u32| {
        let mut request = body(TOKENS - which * 40, false);
        let ids: Vec<u32> =
            (0..8 + which * 11).map(|i| 3 + (i * i * 7 + which * 31) % 250).collect();
        request["prompt"] = json!(ids);
        request["temperature"] = json!(which % 2);
        request["return_token_ids"] = json!(true);
        let reply = post(server.address, "/v1/completions", &request).json();
        let ids = serde_json::from_value(reply["choices"][0]["token_ids"].clone()).unwrap();
        request["stream"] = json!(true);
        RecordedRequest { body: request, ids }
    };
    (0..REQUESTS).map(record).collect()
}
