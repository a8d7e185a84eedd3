//! Results as people and programs read them: a table, or a JSON object a line.
//!
//! Invariant: both show the same fields under the same names; a JSON object says in addition which
//! command made it and where.

#![forbid(unsafe_code)]

use crate::place;
use crate::sample::Series;
use clap::ArgMatches;
use serde_json::{Map, Value};

/// A result: values by name.
pub type Fields = Map<String, Value>;

/// The results of one command.
pub struct Table {
    command: &'static str,
    columns: Vec<(&'static str, usize)>,
    is_json: bool,
    place: Value,
    notes: Vec<String>,
}

/// Columns are at least this wide, so that numbers do not touch.
const COLUMN_MIN: usize = 8;

impl Table {
    /// Prints where this is measured and the title, unless `--json` was given. `columns` are the
    /// fields that people see.
    pub fn new(
        matches: &ArgMatches,
        command: &'static str,
        title: &str,
        columns: &[&'static str],
    ) -> Table {
        let is_json = matches.get_flag("json");
        let place = place::describe();
        if !is_json {
            println!("{}\n{title}", place::line(&place));
        }
        let width = |name: &&'static str| (*name, name.len().max(COLUMN_MIN));
        let columns = columns.iter().map(width).collect();
        Table { command, columns, is_json, place, notes: Vec::new() }
    }

    /// What a reader must know of all results that follow.
    pub fn note(&mut self, text: String) {
        if !self.is_json {
            println!("note: {text}");
        }
        self.notes.push(text);
    }

    /// The names of the columns, for people.
    pub fn head(&self) {
        if !self.is_json {
            let names = self.columns.iter().map(|&(name, width)| format!("{name:>width$}"));
            println!("{}", names.collect::<Vec<_>>().join(" "));
        }
    }

    /// One result.
    pub fn row(&self, mut fields: Fields) {
        if self.is_json {
            fields.insert("command".to_owned(), self.command.into());
            fields.insert("place".to_owned(), self.place.clone());
            if !self.notes.is_empty() {
                fields.insert("notes".to_owned(), self.notes.clone().into());
            }
            println!("{}", Value::Object(fields));
        } else {
            let cell = |&(name, width): &(&str, usize)| {
                format!("{:>width$}", fields.get(name).map_or_else(String::new, shown))
            };
            println!("{}", self.columns.iter().map(cell).collect::<Vec<_>>().join(" "));
        }
    }
}

/// A value as a table shows it.
pub fn shown(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => {
            let number = number.as_f64().unwrap_or(f64::NAN);
            let digits = match number.abs() {
                size if size >= 1000.0 => 0,
                size if size >= 100.0 => 1,
                size if size >= 10.0 => 2,
                _ => 3,
            };
            format!("{number:.digits$}")
        }
        other => other.to_string(),
    }
}

/// The fields of an object that was written in place.
pub fn fields(object: Value) -> Fields {
    match object {
        Value::Object(fields) => fields,
        other => unreachable!("results are objects: {other}"),
    }
}

/// `NAME`: this amount by the median of the seconds; `NAME_p99`: what 99 % of the rounds reached;
/// `NAME_spread`: see [`Series::spread`].
pub fn rate(fields: &mut Fields, name: &str, amount: f64, seconds: &Series) {
    fields.insert(name.to_owned(), (amount / seconds.median()).into());
    fields.insert(format!("{name}_p99"), (amount / seconds.quantile(0.99)).into());
    fields.insert(format!("{name}_spread"), seconds.spread().into());
}

/// `NAME`, `NAME_p99` and `NAME_spread` of values of which less is better.
pub fn cost(fields: &mut Fields, name: &str, values: &Series) {
    fields.insert(name.to_owned(), values.median().into());
    fields.insert(format!("{name}_p99"), values.quantile(0.99).into());
    fields.insert(format!("{name}_spread"), values.spread().into());
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_rate_has_its_worst_and_its_spread() {
        let mut all = fields(json!({}));
        rate(&mut all, "gbps", 8.0, &Series(vec![4.0, 2.0, 1.0]));
        assert_eq!(all["gbps"], json!(4.0));
        assert_eq!(all["gbps_p99"], json!(2.0));
        assert_eq!(all["gbps_spread"], json!(1.5));
    }

    #[test]
    fn numbers_keep_three_digits_at_least() {
        let shown = |value: Value| shown(&value);
        assert_eq!(shown(json!(0.1234)), "0.123");
        assert_eq!(shown(json!(12.34)), "12.34");
        assert_eq!(shown(json!(1234.5)), "1234");
        assert_eq!(shown(json!(1_048_576)), "1048576");
        assert_eq!(shown(json!("tcp")), "tcp");
    }
}
