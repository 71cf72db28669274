//! The GPU of a host: its stream and its captured graphs, on the emulated GPU.

use std::path::Path;

use hip_runtime_sys::{DriverApi, DriverPtr, GpuApi, LibrarySearchPaths};
use serde_json::{Value, json};

use crate::emulated_gpu;
use crate::test_host::TestHost;
use crate::test_model::{PluginFixture, TestModel};

/// Mode in which PyTorch captures: no thread of the process may make a call that a capture forbids.
const CAPTURE_GLOBAL: i32 = 0;

/// Driver and stream of a host.
pub(crate) struct GpuHost {
    driver: DriverApi,
    pub(crate) stream: DriverPtr,
}

/// Executable graph of a host.
pub(crate) struct HostGraph(DriverPtr);

impl GpuHost {
    pub(crate) fn open(library: &Path) -> Self {
        let search = LibrarySearchPaths::named("driver", library);
        let driver = DriverApi::open(GpuApi::Hip, &search).unwrap();
        let mut stream = std::ptr::null_mut();
        // SAFETY: the driver is initialised by the first call, and the output pointer is valid.
        unsafe {
            assert_eq!((driver.init)(0), 0);
            assert_eq!((driver.stream_create)(&raw mut stream, 1), 0);
        }
        Self { driver, stream }
    }

    pub(crate) fn synchronize(&self) {
        // SAFETY: the stream exists.
        assert_eq!(unsafe { (self.driver.stream_synchronize)(self.stream) }, 0);
    }

    /// Captures the launches of `run` into a graph.
    pub(crate) fn capture(&self, run: impl FnOnce()) -> HostGraph {
        let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the stream exists, and the output pointers are valid.
        unsafe {
            assert_eq!((self.driver.capture_begin)(self.stream, CAPTURE_GLOBAL), 0);
            run();
            assert_eq!((self.driver.capture_end)(self.stream, &raw mut graph), 0);
            assert_eq!((self.driver.graph_instantiate)(&raw mut executable, graph, 0), 0);
            assert_eq!((self.driver.graph_destroy)(graph), 0);
        }
        HostGraph(executable)
    }

    pub(crate) fn replay(&self, graph: &HostGraph) {
        // SAFETY: graph and stream exist.
        assert_eq!(unsafe { (self.driver.graph_launch)(graph.0, self.stream) }, 0);
        self.synchronize();
    }

    pub(crate) fn destroy(&self, graph: &HostGraph) {
        // SAFETY: the graph exists and is not used again.
        assert_eq!(unsafe { (self.driver.graph_executable_destroy)(graph.0) }, 0);
    }
}

/// Returns options that open the model of a fixture on the emulated GPU.
pub(crate) fn emulated_options(fixture: &PluginFixture, dir: &Path, library: &Path) -> Value {
    let mut options = fixture.options(dir);
    options["device"] = json!("rocm");
    options["max_num_tokens"] = json!(24);
    options["max_num_rows"] = json!(8);
    options["max_model_len"] = json!(128);
    options["capture_rows"] = json!([1, 2, 4, 8]);
    options["libraries"] = json!({"driver": library, "emulated_warp_size": 64});
    options["kernel_cache"] = json!(emulated_gpu::kernel_cache());
    options
}

/// A model on the emulated GPU, and its host.
pub(crate) struct EmulatedHost {
    pub(crate) model: TestModel,
    pub(crate) host: TestHost,
    pub(crate) gpu: GpuHost,
}

/// Opens a model on the emulated GPU, with a host whose steps run on a stream of its own.
pub(crate) fn open_emulated(test: &str, fixture: &PluginFixture, rehearsed: bool) -> EmulatedHost {
    let dir = tempfile::tempdir().unwrap();
    // A device of its own: a capture in global mode forbids allocations of all other tests on the device.
    let library = emulated_gpu::library_of(&format!("plugin-{test}"));
    let gpu = GpuHost::open(&library);
    let options = emulated_options(fixture, dir.path(), &library);
    let model = TestModel::open(&options, None).unwrap();
    if rehearsed {
        model.rehearse().unwrap();
    }
    let mut host = TestHost::new(&model);
    host.stream = gpu.stream as u64;
    EmulatedHost { model, host, gpu }
}
