//! `HipDevice`: one GPU, its memory, its graphs, and what the files of its kernels build on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hip_runtime_sys::Search;

use super::blaslt::MatrixLibrary;
use super::config::HipConfig;
use super::half::Half;
use super::jit::Jit;
use super::load::Loader;
use super::marks::{HipMarks, Marking};
use super::memory::Scratch;
use super::module::{Function, Modules};
use super::runtime::{Runtime, STREAMS};
use super::source::{Define, Source};
use super::weights::WeightMemory;
use super::{graph, memory};
use crate::{
    Buffer, DeviceError, Driver, Graph, InFlight, KvOrder, Marks, MemInfo, Pinned, Stream,
};

/// Launches beside those of a step. Stream 1 is of copies.
const SIDE: Stream = Stream(2);

/// A GPU.
#[derive(Debug)]
pub struct HipDevice {
    pub(super) half: Half,
    /// As in the configuration.
    pub(super) expanded_bytes: Option<usize>,
    runtime: Arc<Runtime>,
    jit: Jit,
    modules: Modules,
    /// `None` where there is none to be opened.
    library: Option<MatrixLibrary>,
    /// Of each stream.
    scratch: [Scratch; STREAMS],
    /// Of each stream.
    counters: [Scratch; STREAMS],
    weights: WeightMemory,
    /// Where the library that reaches other GPUs is looked for.
    collectives: Option<Search>,
    /// From the first weight to the first capture.
    loader: Mutex<Option<Loader>>,
}

impl HipDevice {
    /// Opens libraries and device. A missing library or device is an error like any other.
    pub fn open(config: &HipConfig) -> Result<Self, DeviceError> {
        let searches = config.searches();
        let runtime = Arc::new(Runtime::open(config, &searches)?);
        let jit = Jit::open(config, &searches, &runtime.facts)?;
        let library = match &searches.blas {
            Some(search) => MatrixLibrary::open(&runtime, search)?.ok(),
            None => None,
        };
        Ok(Self {
            half: config.half,
            expanded_bytes: config.expanded_bytes,
            library,
            runtime,
            jit,
            modules: Modules::default(),
            scratch: Default::default(),
            counters: Default::default(),
            weights: WeightMemory::default(),
            collectives: searches.collectives,
            loader: Mutex::default(),
        })
    }

    /// Architecture: `gfx942`, `sm_90a`, or `emulated`.
    #[must_use]
    pub fn arch(&self) -> &str {
        &self.runtime.facts.arch
    }

    /// Lanes of a wave.
    #[must_use]
    pub fn wave(&self) -> u32 {
        self.runtime.facts.wave
    }

    /// Compute units or streaming multiprocessors.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.runtime.facts.multiprocessors
    }

    /// Whether four waves multiply as one.
    pub(super) fn has_warpgroups(&self) -> bool {
        self.arch() == "sm_90a" || (self.arch() == "emulated" && self.wave() == 32)
    }

    /// Shared memory that one block may have, in bytes.
    #[must_use]
    pub fn shared_bytes(&self) -> u32 {
        self.runtime.facts.shared_bytes
    }

    /// Compiles and loads several sources at once, for a start that would do so one by one.
    pub fn compile(&self, builds: &[(&'static Source, Vec<Define>)]) -> Result<(), DeviceError> {
        Ok(self.modules.load_all(&self.runtime, &self.jit, builds, &mut |_, _| {})?)
    }

    pub(super) fn runtime(&self) -> &Arc<Runtime> {
        &self.runtime
    }

    pub(super) fn matrix_library(&self) -> Option<&MatrixLibrary> {
        self.library.as_ref()
    }

    pub(super) fn collectives(&self) -> Option<&Search> {
        self.collectives.as_ref()
    }

    pub(super) fn weights(&self) -> &WeightMemory {
        &self.weights
    }

    pub(super) fn loader(&self) -> MutexGuard<'_, Option<Loader>> {
        self.loader.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The kernel `name` of `source`, specialised by `defines`; compiled when it is first asked for, which
    /// must not be during a capture: whoever captures runs everything once before.
    pub(super) fn kernel(
        &self,
        source: &'static Source,
        name: &'static str,
        defines: &[Define],
    ) -> Result<Function, DeviceError> {
        Ok(self.modules.function(&self.runtime, &self.jit, source, name, defines)?)
    }

    /// At least `bytes` of memory between two launches of `s`, which other streams do not know. The address stays the same for as
    /// long as no more is asked for, and remains valid afterwards; the contents belong to the last writer.
    pub(super) fn scratch(&self, s: &Stream, bytes: usize) -> Result<*mut u8, DeviceError> {
        self.runtime.stream(s)?;
        Ok(self.scratch[s.0].at_least(&self.runtime, bytes)?)
    }

    /// At least `words` 32-bit counters of `s` that are zero: whoever counts leaves them zero.
    pub(super) fn counters(&self, s: &Stream, words: usize) -> Result<*mut u8, DeviceError> {
        self.runtime.stream(s)?;
        Ok(self.counters[s.0].at_least(&self.runtime, words * 4)?)
    }
}

impl Driver for HipDevice {
    fn name(&self) -> String {
        let facts = &self.runtime.facts;
        let library = if self.library.is_some() { "with" } else { "without" };
        format!(
            "{}, {}, {} multiprocessors, {library} a matrix library",
            facts.name, facts.arch, facts.multiprocessors
        )
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        Ok(memory::alloc(&self.runtime, bytes)?)
    }

    fn upload(&self, to: &mut Buffer, offset: usize, from: &[u8]) -> Result<(), DeviceError> {
        self.copy_in(to, offset, from)
    }

    fn download(
        &self,
        s: &Stream,
        from: &Buffer,
        offset: usize,
        to: &mut [u8],
    ) -> Result<(), DeviceError> {
        self.copy_out(s, from, offset, to)
    }

    fn synchronize(&self, s: &Stream) -> Result<(), DeviceError> {
        Ok(self.runtime.synchronize(s)?)
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<Pinned, DeviceError> {
        // SAFETY: memory of the host.
        Ok(unsafe { Pinned::from_host(memory::alloc_host(&self.runtime, bytes)?) })
    }

    fn start_upload(
        &self,
        s: &Stream,
        to: &mut Buffer,
        from: Pinned,
        bytes: usize,
    ) -> Result<InFlight, DeviceError> {
        self.begin_copy_in(s, to, from, bytes)
    }

    fn start_download(
        &self,
        s: &Stream,
        from: &Buffer,
        to: Pinned,
        bytes: usize,
    ) -> Result<InFlight, DeviceError> {
        self.begin_copy_out(s, from, to, bytes)
    }

    fn zero(&self, s: &Stream, x: &mut Buffer) -> Result<(), DeviceError> {
        self.fill_with_zeros(s, x)
    }

    fn captures_graphs(&self) -> bool {
        true
    }

    fn begin_capture(&self, s: &Stream) -> Result<(), DeviceError> {
        // Whoever captures has loaded its weights: threads and pinned memory are of no more use.
        drop(self.loader().take());
        Ok(graph::begin(&self.runtime, s)?)
    }

    fn end_capture(&self, s: &Stream) -> Result<Graph, DeviceError> {
        Ok(Graph(Box::new(graph::end(&self.runtime, s)?)))
    }

    fn begin_rehearsal(&self) {
        self.runtime.set_rehearsing(true);
    }

    fn end_rehearsal(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), DeviceError> {
        self.runtime.set_rehearsing(false);
        Ok(self.modules.load_wanted(&self.runtime, &self.jit, progress)?)
    }

    fn side(&self) -> Option<Stream> {
        (!self.runtime.is_marking()).then_some(SIDE)
    }

    fn follow(&self, s: &Stream, other: &Stream) -> Result<(), DeviceError> {
        Ok(self.launch_behind(s, other)?)
    }

    fn settle(&self) {
        self.runtime.settle();
    }

    fn alloc_marks(&self, count: usize) -> Result<Arc<dyn Marks>, DeviceError> {
        Ok(Arc::new(HipMarks::new(&self.runtime, count)?))
    }

    fn begin_marking(&self, marks: &Arc<dyn Marks>, first: usize) {
        let (marks, names) = (Arc::clone(marks), Vec::new());
        self.runtime.set_marking(Some(Marking { marks, next: first, names }));
    }

    fn end_marking(&self) -> Vec<&'static str> {
        self.runtime.set_marking(None).map_or_else(Vec::new, |marking| marking.names)
    }

    fn kv_order(&self) -> KvOrder {
        KvOrder::Rows
    }

    fn mem_info(&self) -> MemInfo {
        let (free_bytes, total_bytes) = self.runtime.mem_info();
        MemInfo { free_bytes, total_bytes }
    }
}
