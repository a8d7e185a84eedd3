//! A file of trace events that is a whole JSON document after each write.

use serde_json::Value;
use std::fs::{File, create_dir_all};
use std::io::Result;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const HEAD: &str = "{\"traceEvents\":[\n";

/// See the [module](self).
pub(super) struct TraceFile {
    path: PathBuf,
    file: File,
    /// Where the next event goes: there the end of the document begins.
    end: u64,
}

impl TraceFile {
    /// Makes the file and the folders above it. What was there is replaced.
    pub(super) fn create(path: &Path) -> Result<TraceFile> {
        if let Some(folder) = path.parent() {
            create_dir_all(folder)?;
        }
        let file = File::create(path)?;
        let mut made = TraceFile { path: path.to_owned(), file, end: 0 };
        made.file.write_all_at(HEAD.as_bytes(), 0)?;
        made.end = HEAD.len() as u64;
        made.append("", &Value::Null)?;
        Ok(made)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Appends events, each with a comma and a line's end behind it, and writes the end of the
    /// document anew.
    pub(super) fn append(&mut self, events: &str, metadata: &Value) -> Result<()> {
        // The comma behind the last event is taken back: JSON has none there.
        let is_first = self.end == HEAD.len() as u64;
        let body = events.strip_suffix(",\n").unwrap_or(events);
        let joint = if is_first || body.is_empty() { "" } else { ",\n" };
        let tail = format!("\n],\"displayTimeUnit\":\"ms\",\"metadata\":{metadata}}}\n");
        let text = format!("{joint}{body}{tail}");
        self.file.write_all_at(text.as_bytes(), self.end)?;
        self.file.set_len(self.end + text.len() as u64)?;
        self.end += (text.len() - tail.len()) as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn it_is_whole_after_each_write() {
        let folder = std::env::temp_dir().join(format!("bps-file-{}", std::process::id()));
        let path = folder.join("3/comm.json");
        let mut file = TraceFile::create(&path).unwrap();
        let read = || -> Value {
            serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).expect("JSON")
        };
        assert_eq!(read()["traceEvents"], json!([]));
        file.append("{\"a\":1},\n{\"a\":2},\n", &json!({ "long": "x".repeat(100) })).unwrap();
        assert_eq!(read()["traceEvents"], json!([{ "a": 1 }, { "a": 2 }]));
        file.append("", &json!({})).unwrap();
        file.append("{\"a\":3},\n", &json!({ "dropped": 7 })).unwrap();
        let whole = read();
        assert_eq!(whole["traceEvents"], json!([{ "a": 1 }, { "a": 2 }, { "a": 3 }]));
        assert_eq!(whole["metadata"]["dropped"], 7);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
