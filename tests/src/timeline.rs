//! Timelines as tests read them.

use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// A slice of a track, in microseconds.
#[derive(Clone, Debug)]
pub struct Slice {
    /// Its name.
    pub name: String,
    /// Process and track.
    pub track: (u64, u64),
    /// Its begin.
    pub from: f64,
    /// Its end.
    pub to: f64,
    /// The part.
    pub key: u64,
    /// Its round.
    pub round: u64,
    /// Which rank is concerned.
    pub rank: u64,
}

/// What a process has written.
pub struct Trace {
    /// All of it.
    pub whole: Value,
    /// Its slices, as they were written.
    pub slices: Vec<Slice>,
}

impl Trace {
    /// Reads the file of a process: `0` is rank 0, `server-0` server 0.
    pub fn read(folder: &Path, process: &str) -> Trace {
        let path = folder.join(process).join("comm.json");
        let text = std::fs::read_to_string(&path)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let whole: Value = serde_json::from_str(&text).expect("JSON");
        let number = |value: &Value| value.as_u64().expect("a number");
        let slices = whole["traceEvents"]
            .as_array()
            .expect("events")
            .iter()
            .filter(|event| event["ph"] == "X")
            .map(|event| {
                let from = event["ts"].as_f64().expect("a time");
                Slice {
                    name: event["name"].as_str().expect("a name").to_owned(),
                    track: (number(&event["pid"]), number(&event["tid"])),
                    from,
                    to: from + event["dur"].as_f64().expect("a duration"),
                    key: number(&event["args"]["key"]),
                    round: number(&event["args"]["round"]),
                    rank: number(&event["args"]["rank"]),
                }
            })
            .collect();
        Trace { whole, slices }
    }

    /// The slices of this name.
    pub fn named(&self, name: &str) -> Vec<&Slice> {
        self.slices.iter().filter(|slice| slice.name == name).collect()
    }

    /// The distance that its times may have from the truth, and a microsecond for the reading of
    /// large numbers as floats.
    pub fn error_us(&self) -> f64 {
        assert_eq!(self.whole["metadata"]["dropped"], 0);
        self.whole["metadata"]["clock"]["error_us"].as_f64().expect("a bound") + 1.0
    }

    /// Whether the scheduler had told the time before the job was over.
    pub fn knows_the_time(&self) -> bool {
        self.whole["metadata"]["clock"]["error_us"].is_number()
    }

    /// Slices of one track never overlap.
    #[track_caller]
    pub fn assert_whole_and_apart(&self) {
        let mut tracks: HashMap<(u64, u64), Vec<(f64, f64)>> = HashMap::new();
        for slice in &self.slices {
            assert!(slice.to >= slice.from, "{slice:?}");
            tracks.entry(slice.track).or_default().push((slice.from, slice.to));
        }
        for (track, mut spans) in tracks {
            spans.sort_by(|one, other| one.partial_cmp(other).expect("numbers"));
            for pair in spans.windows(2) {
                assert!(pair[0].1 <= pair[1].0 + 1.0, "track {track:?}: {pair:?} overlap");
            }
        }
    }

    /// The stages of every part of a round of the tensor, in their order.
    pub fn stages(&self, tensor: &str, round: u64) -> Vec<Vec<String>> {
        let prefix = format!("Comm.{tensor}.");
        let mut parts: BTreeMap<u64, Vec<(f64, String)>> = BTreeMap::new();
        for slice in self.slices.iter().filter(|slice| slice.round == round) {
            if let Some(stage) = slice.name.strip_prefix(&prefix) {
                parts.entry(slice.key).or_default().push((slice.from, stage.to_owned()));
            }
        }
        let in_order = |mut part: Vec<(f64, String)>| {
            // Those that begin together stay as they were written.
            part.sort_by(|one, other| one.0.partial_cmp(&other.0).expect("numbers"));
            part.into_iter().map(|(_, stage)| stage).collect()
        };
        parts.into_values().map(in_order).collect()
    }
}
