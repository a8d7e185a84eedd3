//! Scenarios: which command shows what, and what it must reach. Each is a file of `perf/scenarios`.
//!
//! Invariant: a scenario is data; `bps-perf run` starts its commands as anyone would by hand, and
//! judges the fields that they print.

#![forbid(unsafe_code)]

use crate::report::shown;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// A file of `perf/scenarios`.
#[derive(Debug)]
pub struct Scenario {
    /// The file's name without its ending.
    pub name: String,
    /// What it shows, in a sentence.
    pub shows: String,
    /// Arguments of `bps-perf`, one list a run.
    pub commands: Vec<Vec<String>>,
    /// Arguments of tiny runs, in their place.
    pub smoke: Vec<Vec<String>>,
    /// What must hold.
    pub targets: Vec<Target>,
}

/// A bound on a field of every result that `when` fits.
#[derive(Debug)]
pub struct Target {
    /// The field.
    pub field: String,
    /// Whether the bound is the least or the most that is good.
    pub comparison: Comparison,
    /// The bound.
    pub bound: f64,
    /// Fields and values of the results that are meant; all results if it is empty.
    pub when: Map<String, Value>,
}

/// How a value is held against a bound.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Comparison {
    /// `>=`
    AtLeast,
    /// `<=`
    AtMost,
}

/// A target held against a result.
#[derive(Debug)]
pub struct Verdict {
    /// Which result; empty if none is meant.
    pub of: String,
    /// What was measured, if the result has the field.
    pub value: Option<f64>,
    /// Whether it is good enough.
    pub met: bool,
}

impl Scenario {
    /// Reads one file.
    ///
    /// # Errors
    /// The file, the field, and what is wrong with it.
    pub fn read(path: &Path) -> Result<Scenario, String> {
        let at = |problem: String| format!("{}: {problem}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| at(error.to_string()))?;
        let file: Value = serde_json::from_str(&text).map_err(|error| at(error.to_string()))?;
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        Scenario::parse(name, &file).map_err(at)
    }

    fn parse(name: String, file: &Value) -> Result<Scenario, String> {
        let known = ["name", "shows", "commands", "smoke", "targets"];
        let object = file.as_object().ok_or("it is not an object")?;
        if let Some(unknown) = object.keys().find(|key| !known.contains(&key.as_str())) {
            return Err(format!("unknown field `{unknown}`; there are {known:?}"));
        }
        let text = |key: &str| {
            file[key].as_str().map(str::to_owned).ok_or(format!("`{key}` must be a text"))
        };
        if text("name")? != name {
            return Err(format!("`name` must be the file's name, `{name}`"));
        }
        let (commands, smoke) = (lines(file, "commands")?, lines(file, "smoke")?);
        if commands.is_empty() || smoke.is_empty() {
            return Err("`commands` and `smoke` have at least one line each".into());
        }
        let targets = file["targets"].as_array().ok_or("`targets` must be a list")?;
        let targets = targets.iter().map(Target::parse).collect::<Result<_, String>>()?;
        Ok(Scenario { name, shows: text("shows")?, commands, smoke, targets })
    }
}

fn lines(file: &Value, key: &str) -> Result<Vec<Vec<String>>, String> {
    let wrong = || format!("`{key}` must be a list of texts, each the arguments of a command");
    let word = |text: &Value| {
        let words = text.as_str()?.split_whitespace();
        Some(words.map(str::to_owned).collect())
    };
    let list = file[key].as_array().ok_or_else(wrong)?;
    list.iter().map(|text| word(text).ok_or_else(wrong)).collect()
}

impl Target {
    fn parse(value: &Value) -> Result<Target, String> {
        let field = value["field"].as_str().ok_or("a target needs `field`, a text")?.to_owned();
        let comparison = match value["comparison"].as_str() {
            Some(">=") => Comparison::AtLeast,
            Some("<=") => Comparison::AtMost,
            _ => return Err(format!("the target of {field} needs `comparison`, >= or <=")),
        };
        let bound = value["bound"].as_f64();
        let bound = bound.ok_or(format!("the target of {field} needs `bound`, a number"))?;
        let when = value["when"].as_object().cloned().unwrap_or_default();
        Ok(Target { field, comparison, bound, when })
    }

    /// The comparison and the bound.
    pub fn wish(&self) -> String {
        let sign = if self.comparison == Comparison::AtLeast { ">=" } else { "<=" };
        format!("{sign} {}", self.bound)
    }

    /// Holds it against the results that are meant. A target that no result fits is not met.
    pub fn judge(&self, results: &[Value]) -> Vec<Verdict> {
        let fits = |result: &&Value| {
            self.when.iter().all(|(key, wanted)| match wanted.as_array() {
                Some(several) => several.contains(&result[key]),
                None => result[key] == *wanted,
            })
        };
        let one = |result: &Value| {
            // Yes is 1 and no is 0.
            let value = &result[&self.field];
            let value = value.as_f64().or(value.as_bool().map(f64::from));
            let good = |value: f64| match self.comparison {
                Comparison::AtLeast => value >= self.bound,
                Comparison::AtMost => value <= self.bound,
            };
            Verdict { of: label(result), value, met: value.is_some_and(good) }
        };
        let verdicts: Vec<Verdict> = results.iter().filter(fits).map(one).collect();
        if verdicts.is_empty() {
            return vec![Verdict { of: String::new(), value: None, met: false }];
        }
        verdicts
    }
}

/// What tells one result of a scenario from another.
pub fn label(result: &Value) -> String {
    const TELLING: [&str; 23] = [
        "work",
        "precision",
        "way",
        "hosts",
        "gpus_per_host",
        "dtype",
        "codec",
        "encoding",
        "transport",
        "driver",
        "idle",
        "workers",
        "servers",
        "cores",
        "tensors",
        "size_bytes",
        "partition_bytes",
        "piece_bytes",
        "colocated",
        "rate_bits",
        "set",
        "probe",
        "thread",
    ];
    let part = |name: &&str| result.get(*name).map(|value| format!("{name}={}", shown(value)));
    TELLING.iter().filter_map(part).collect::<Vec<_>>().join(" ")
}

/// Every scenario below the current directory, by name.
///
/// # Errors
/// There is no such folder, or a file in it is wrong.
pub fn all() -> Result<Vec<Scenario>, String> {
    let folder = PathBuf::from("perf/scenarios");
    let entries = std::fs::read_dir(&folder).map_err(|error| {
        format!("{}: {error}: run this in the repository's root", folder.display())
    })?;
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.extension().is_some_and(|ending| ending == "json"));
    paths.sort();
    paths.iter().map(|path| Scenario::read(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn targets_are_held_against_the_results_that_they_mean() {
        let target = Target::parse(&json!({
            "field": "ratio", "comparison": ">=", "bound": 0.95, "when": {"dtype": ["f32", "f64"]}
        }));
        let results = [
            json!({"dtype": "f32", "ratio": 0.97}),
            json!({"dtype": "f64", "ratio": 0.90}),
            json!({"dtype": "f16", "ratio": 0.1}),
        ];
        let target = target.unwrap();
        let met: Vec<bool> = target.judge(&results).iter().map(|verdict| verdict.met).collect();
        assert_eq!(met, [true, false]);
        assert!(!target.judge(&results[2..])[0].met, "a target without a result is not met");
        assert!(!target.judge(&[json!({"dtype": "f32"})])[0].met, "nor is one without the field");
    }

    #[test]
    fn a_wrong_file_says_what_is_wrong() {
        let parse = |file: Value| Scenario::parse("x".into(), &file).unwrap_err();
        assert!(parse(json!([])).contains("object"));
        assert!(parse(json!({"nam": 1})).contains("`nam`"));
        assert!(parse(json!({"name": "y"})).contains("file's name"));
        let good =
            json!({"name": "x", "shows": "y", "commands": ["sum"], "smoke": [], "targets": []});
        assert!(parse(good).contains("`smoke`"));
        assert!(Target::parse(&json!({"field": "a"})).unwrap_err().contains("comparison"));
    }
}
