//! Mock server of the model hub on loopback.

use super::*;

const SHA: &str = "0123456789abcdef0123456789abcdef01234567";

/// State of the mock hub: its files, its configured behaviour, and the requests that it has received.
#[derive(Default)]
pub(super) struct MockHubState {
    pub(super) files: BTreeMap<String, Vec<u8>>,
    /// For each file, the number of body bytes after which each successive transfer is cut off.
    pub(super) cuts: BTreeMap<String, Vec<usize>>,
    /// HTTP status of all responses; `None` = normal responses.
    pub(super) status: Option<u16>,
    pub(super) ignore_ranges: bool,
    /// File and first byte offset of each response body that was sent, as `file@offset`.
    pub(super) sent: Vec<String>,
    pub(super) tokens: Vec<String>,
}

/// Mock server of the model hub, which runs in a thread of the test.
#[derive(Clone)]
pub(super) struct MockHub {
    pub(super) state: Arc<Mutex<MockHubState>>,
    pub(super) url: String,
}

impl MockHub {
    pub(super) fn start(files: &BTreeMap<&str, &[u8]>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let files = files.iter().map(|(name, body)| ((*name).to_owned(), body.to_vec()));
        let state = MockHubState { files: files.collect(), ..MockHubState::default() };
        let mock = Self { state: Arc::new(Mutex::new(state)), url };
        let server = mock.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = server.clone();
                std::thread::spawn(move || server.serve_request(stream));
            }
        });
        mock
    }

    fn serve_request(&self, mut stream: TcpStream) -> Option<()> {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let request = lines.next()?.ok()?;
        let path = request.split(' ').nth(1)?.to_owned();
        let mut start = None;
        for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
            let line = line.to_ascii_lowercase();
            if let Some(range) = line.strip_prefix("range: bytes=") {
                start = Some(range.trim_end_matches("-0").trim_end_matches('-').parse().ok()?);
                if range.trim_end().ends_with("-0") {
                    start = Some(usize::MAX); // Requests the length only.
                }
            }
            if let Some(token) = line.strip_prefix("authorization: ") {
                self.state.lock().unwrap().tokens.push(token.to_owned());
            }
        }
        let reply = self.reply(&path, start);
        stream.write_all(&reply).ok()
    }

    fn reply(&self, path: &str, start: Option<usize>) -> Vec<u8> {
        let mut state = self.state.lock().unwrap();
        if let Some(status) = state.status {
            return head(status, "content-length: 0");
        }
        if path.starts_with("/api/models/") {
            let is_known =
                ["main", SHA, "v1"].iter().any(|r| path.ends_with(&format!("/revision/{r}")));
            if !is_known || !path.contains("/models/owner/name/") {
                return head(404, "content-length: 0");
            }
            let siblings: Vec<_> =
                state.files.keys().map(|f| serde_json::json!({"rfilename": f})).collect();
            let body = serde_json::json!({"sha": SHA, "siblings": siblings}).to_string();
            let mut reply = head(200, &format!("content-length: {}", body.len()));
            reply.extend_from_slice(body.as_bytes());
            return reply;
        }
        let file = path.rsplit('/').next().unwrap().to_owned();
        let Some(body) = state.files.get(&file).cloned() else {
            return head(404, "content-length: 0");
        };
        let tags = format!("etag: \"etag-{file}\"\r\nx-repo-commit: {SHA}\r\n");
        let (first, last) = match start {
            Some(usize::MAX) => (0, 1.min(body.len())),
            Some(first) if !state.ignore_ranges => (first, body.len()),
            _ => (0, body.len()),
        };
        let part = &body[first..last];
        let headers = format!(
            "{tags}content-length: {}\r\ncontent-range: bytes {first}-{}/{}",
            part.len(),
            last.saturating_sub(1),
            body.len()
        );
        let mut reply = head(206, &headers);
        let mut part = part;
        if start != Some(usize::MAX) {
            state.sent.push(format!("{file}@{first}"));
            let cut = state
                .cuts
                .get_mut(&file)
                .and_then(|cuts| if cuts.is_empty() { None } else { Some(cuts.remove(0)) });
            part = &part[..cut.unwrap_or(part.len()).min(part.len())];
        }
        reply.extend_from_slice(part);
        reply
    }

    pub(super) fn set(&self, change: impl FnOnce(&mut MockHubState)) {
        change(&mut self.state.lock().unwrap());
    }

    pub(super) fn fetch(&self, dir: &Path, revision: Option<&str>) -> Result<PathBuf, HubError> {
        self.fetch_as(dir, revision, HubFileSet::Everything, false)
    }

    pub(super) fn fetch_as(
        &self,
        dir: &Path,
        revision: Option<&str>,
        file_set: HubFileSet,
        offline: bool,
    ) -> Result<PathBuf, HubError> {
        let environment = ProcessEnvironment {
            hub_endpoint: Some(self.url.clone()),
            hub_cache: Some(dir.to_owned()),
            hub_token: Some("secret".to_owned()),
            hub_offline: offline,
            ..ProcessEnvironment::default()
        };
        resolve("owner/name", revision, file_set, &environment, None)
    }
}

fn head(status: u16, headers: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} X\r\nconnection: close\r\n{headers}\r\n\r\n").into_bytes()
}
