//! Steps against the formulas of the papers in f64, every instruction set against the scalar code,
//! and what can be said of optimizers and rounds.

use super::{Act, Deed, Number, Optimizer, STEPS_MAX, Slots};
use crate::reduce::{Isa, Kernels, kernels};

fn optimizer(text: &str) -> Optimizer {
    text.parse().unwrap()
}

fn number(value: f64) -> Number {
    Number::new(value).unwrap()
}

/// Parameters and what is kept for them.
#[derive(Clone, PartialEq, Debug)]
struct State([Vec<f32>; 3]);

impl State {
    fn new(count: usize) -> State {
        let start = (0..count).map(|at| ((at * 37 % 101) as f32 - 50.0) / 25.0).collect();
        State([start, vec![0.0; count], vec![0.0; count]])
    }

    fn step(&mut self, kernels: &Kernels, optimizer: &Optimizer, step: u64, sums: (&[f32], f32)) {
        let [master, first, second] = &mut self.0;
        let slots = Slots { master, first, second };
        optimizer.step(kernels, (rate(step), step), sums, slots);
    }
}

fn rate(step: u64) -> Number {
    number(0.1 / step as f64)
}

fn sums(count: usize, step: u64) -> Vec<f32> {
    (0..count as u64).map(|at| ((at * 53 + step * 29) % 97) as f32 / 16.0 - 3.0).collect()
}

const TEXTS: [&str; 7] = [
    "sgd",
    "sgd(weight_decay=0.25)",
    "sgd(momentum=0.9)",
    "sgd(momentum=0.9,dampening=0.5,weight_decay=0.125)",
    "sgd(momentum=0.75,nesterov)",
    "adam(weight_decay=0.125)",
    "adamw(beta1=0.8,beta2=0.95,eps=1e-6,weight_decay=0.25)",
];

/// One element's step in f64, by the formulas.
fn reference(optimizer: &Optimizer, step: u64, gradient: f64, state: &mut [f64; 3]) {
    let [value, first, second] = state;
    let rate = rate(step).get();
    match *optimizer {
        Optimizer::Sgd { momentum, dampening, weight_decay, nesterov } => {
            let gradient = gradient + weight_decay.get() * *value;
            if momentum == Number::ZERO {
                *value -= rate * gradient;
                return;
            }
            let taken = if step == 1 { 1.0 } else { 1.0 - dampening.get() };
            *first = momentum.get() * *first + taken * gradient;
            let moved = if nesterov { gradient + momentum.get() * *first } else { *first };
            *value -= rate * moved;
        }
        Optimizer::Adam { beta1, beta2, eps, weight_decay, decoupled } => {
            let decay = weight_decay.get();
            let gradient = if decoupled { gradient } else { gradient + decay * *value };
            if decoupled {
                *value -= rate * decay * *value;
            }
            *first = beta1.get() * *first + (1.0 - beta1.get()) * gradient;
            *second = beta2.get() * *second + (1.0 - beta2.get()) * gradient * gradient;
            let power = i32::try_from(step).unwrap();
            let mean = *first / (1.0 - beta1.get().powi(power));
            let square = *second / (1.0 - beta2.get().powi(power));
            *value -= rate * mean / (square.sqrt() + eps.get());
        }
    }
}

#[test]
fn steps_are_those_of_the_formulas() {
    for text in TEXTS {
        let optimizer = optimizer(text);
        let mut state = State::new(100);
        let mut exact: Vec<[f64; 3]> =
            state.0[0].iter().map(|value| [f64::from(*value), 0.0, 0.0]).collect();
        for step in 1..=20 {
            let sums = sums(100, step);
            state.step(kernels(), &optimizer, step, (&sums, 0.5));
            for (exact, sum) in exact.iter_mut().zip(&sums) {
                reference(&optimizer, step, f64::from(*sum) * 0.5, exact);
            }
        }
        for (slot, values) in state.0.iter().enumerate().take(optimizer.slots()) {
            for (value, exact) in values.iter().zip(&exact) {
                let apart = (f64::from(*value) - exact[slot]).abs();
                assert!(apart < 4e-6, "{text}, slot {slot}: {value} for {}", exact[slot]);
            }
        }
    }
}

#[test]
fn every_instruction_set_and_every_cut_gives_the_same_bits() {
    let count = 1003;
    for text in TEXTS {
        let optimizer = optimizer(text);
        let scalar = Kernels::with_isa(Isa::Scalar).unwrap();
        let mut expected = State::new(count);
        for step in 1..=5 {
            expected.step(scalar, &optimizer, step, (&sums(count, step), 0.25));
        }
        for kernels in Isa::ALL.into_iter().filter_map(Kernels::with_isa) {
            let mut state = State::new(count);
            for step in 1..=5 {
                let sums = sums(count, step);
                let cut = usize::try_from(17 * step).unwrap();
                for range in [0..cut, cut..count] {
                    let [master, first, second] = &mut state.0;
                    let slots = Slots {
                        master: &mut master[range.clone()],
                        first: &mut first[range.clone()],
                        second: &mut second[range.clone()],
                    };
                    let sums = (&sums[range], 0.25);
                    optimizer.step(kernels, (rate(step), step), sums, slots);
                }
            }
            assert_eq!(state, expected, "{text} by {}", kernels.isa());
        }
    }
}

#[test]
fn what_is_not_kept_needs_no_memory() {
    for (text, slots) in [("sgd", 1), ("sgd(momentum=0.5)", 2), ("adam", 3)] {
        let optimizer = optimizer(text);
        assert_eq!(optimizer.slots(), slots);
        let mut state = State::new(3);
        state.0[slots..].iter_mut().for_each(Vec::clear);
        state.step(kernels(), &optimizer, 1, (&[1.0; 3], 1.0));
        assert_ne!(state.0[0], State::new(3).0[0]);
    }
}

#[test]
fn an_optimizer_is_written_and_read() {
    let cases = [
        ("SGD", "sgd(momentum=0,dampening=0,weight_decay=0)"),
        (
            "sgd( nesterov, momentum = 0.9 )",
            "sgd(momentum=0.9,dampening=0,weight_decay=0,nesterov)",
        ),
        ("adam", "adam(beta1=0.9,beta2=0.999,eps=0.00000001,weight_decay=0)"),
        (
            "adamw(weight_decay=1e-2)",
            "adamw(beta1=0.9,beta2=0.999,eps=0.00000001,weight_decay=0.01)",
        ),
        ("sgd(momentum=-0)", "sgd(momentum=0,dampening=0,weight_decay=0)"),
    ];
    for (text, written) in cases {
        let optimizer = optimizer(text);
        assert_eq!(optimizer.to_string(), written);
        let json = serde_json::to_string(&optimizer).unwrap();
        assert_eq!(serde_json::from_str::<Optimizer>(&json).unwrap(), optimizer);
    }
}

#[test]
fn what_is_no_optimizer_is_said() {
    let cases = [
        ("lion", "`lion` is no optimizer of servers: use one of sgd"),
        ("sgd(momentum=0.9", "is no optimizer of servers"),
        ("sgd(beta1=0.9)", "sgd has no parameter `beta1`"),
        ("sgd(momentum=0.9,momentum=0.8)", "`momentum`, or has it twice"),
        ("sgd(momentum=-1)", "`momentum` is a finite number from 0, not `-1`"),
        ("sgd(momentum=inf)", "not `inf`"),
        ("adam(beta2=1)", "`beta2` is a number from 0 to below 1, not `1`"),
        ("adamw(eps)", "`eps` is a finite number from 0, not ``"),
        ("sgd(nesterov)", "nesterov needs a momentum"),
        ("sgd(momentum=0.9,dampening=0.1,nesterov=true)", "nesterov needs a momentum"),
        ("sgd(nesterov=maybe)", "`nesterov` is true or false"),
    ];
    for (text, why) in cases {
        let error = text.parse::<Optimizer>().unwrap_err().to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
    let long = "x".repeat(500);
    assert!(long.parse::<Optimizer>().unwrap_err().to_string().contains("500 bytes"));
}

#[test]
fn an_act_travels_as_one_word() {
    let rates = [0.0, 1e-300, 0.1, f64::MAX].map(number);
    for rate in rates {
        let act = Act::from_word(Act::step(rate).word());
        assert_eq!(act.deed(), Some(Deed::Step { rate }));
        assert!(act.is_step() && act != Act::NONE);
    }
    for (slot, steps) in [(0, 0), (2, 77), (255, STEPS_MAX)] {
        let act = Act::from_word(Act::set(slot, steps).word());
        assert_eq!(act.deed(), Some(Deed::Set { slot, steps }));
        let act = Act::from_word(Act::get(slot).word());
        assert_eq!(act.deed(), Some(Deed::Get { slot }));
        assert!(!act.is_step());
    }
    assert_eq!(Act::NONE.deed(), None);
    for word in
        [1, 3 << 56, (2 << 56) + 1, f64::NAN.to_bits() | 1 << 63, (-f64::INFINITY).to_bits()]
    {
        assert_eq!(Act::from_word(word).deed(), None, "{word:#x}");
    }
}

#[test]
fn a_round_suits_an_optimizer_that_keeps_its_slot() {
    let (sgd, adam) = (optimizer("sgd(momentum=0.9)"), optimizer("adam"));
    assert!(Act::get(2).suits(&adam) && !Act::get(2).suits(&sgd));
    assert!(Act::set(1, 0).suits(&sgd) && !Act::set(3, 0).suits(&adam));
    assert!(Act::step(number(0.5)).suits(&sgd) && !Act::NONE.suits(&sgd));
    assert_eq!(Act::step(number(0.5)).to_string(), "a step with learning rate 0.5");
}
