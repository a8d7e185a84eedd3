//! One step on the elements of a part: the operations of torch's optimizers for single tensors, in
//! their order, each rounded to f32. Factors are made in f64, as Python makes them, and rounded
//! once.

use super::{Number, Optimizer};
use crate::encode::wide::wide;
use crate::reduce::Kernels;

/// What is kept for the elements of a part: as many of each. What the optimizer does not remember
/// may be empty.
pub struct Slots<'memory> {
    /// The parameters.
    pub master: &'memory mut [f32],
    /// SGD's momentum, or Adam's mean of gradients.
    pub first: &'memory mut [f32],
    /// Adam's mean of their squares.
    pub second: &'memory mut [f32],
}

#[allow(clippy::cast_possible_truncation, reason = "rounded to the nearest f32")]
fn narrow(value: f64) -> f32 {
    value as f32
}

/// SGD's factors, in f32.
struct Sgd {
    rate: f32,
    momentum: f32,
    /// How much of the gradient the momentum takes; `None` in the first step, of which the gradient
    /// is the momentum.
    taken: Option<f32>,
    weight_decay: f32,
    nesterov: bool,
}

/// Adam's factors, in f32.
struct Adam {
    step_size: f32,
    /// 1 - beta1.
    news: f32,
    beta2: f32,
    /// 1 - beta2.
    square_news: f32,
    root: f32,
    eps: f32,
    /// Of the gradient, if it is not decoupled.
    weight_decay: f32,
    /// What is left of a parameter, if it is.
    shrunk: Option<f32>,
}

impl Optimizer {
    /// Step number `step`, from 1, at this learning rate. The gradients are the sums, times
    /// `scale`.
    ///
    /// # Panics
    /// What the optimizer uses does not have as many elements as there are sums.
    pub fn step(
        &self,
        kernels: &Kernels,
        (rate, step): (Number, u64),
        (sums, scale): (&[f32], f32),
        slots: Slots<'_>,
    ) {
        let Slots { master, first, second } = slots;
        let count = sums.len();
        let master = &mut master[..count];
        match *self {
            Optimizer::Sgd { momentum, dampening, weight_decay, nesterov } => {
                let sgd = Sgd {
                    rate: narrow(-rate.get()),
                    momentum: narrow(momentum.get()),
                    taken: (step > 1).then(|| narrow(1.0 - dampening.get())),
                    weight_decay: narrow(weight_decay.get()),
                    nesterov,
                };
                if momentum == Number::ZERO {
                    wide!(kernels, sgd.plain(sums, scale, master));
                } else {
                    let first = &mut first[..count];
                    wide!(kernels, sgd.with_momentum(sums, scale, master, first));
                }
            }
            Optimizer::Adam { beta1, beta2, eps, weight_decay, decoupled } => {
                #[allow(clippy::cast_precision_loss, reason = "steps are below 2^53")]
                let step = step as f64;
                let correction = |beta: Number| 1.0 - beta.get().powf(step);
                let adam = Adam {
                    step_size: narrow(-(rate.get() / correction(beta1))),
                    news: narrow(1.0 - beta1.get()),
                    beta2: narrow(beta2.get()),
                    square_news: narrow(1.0 - beta2.get()),
                    root: narrow(correction(beta2).sqrt()),
                    eps: narrow(eps.get()),
                    weight_decay: if decoupled { 0.0 } else { narrow(weight_decay.get()) },
                    shrunk: decoupled.then(|| narrow(1.0 - rate.get() * weight_decay.get())),
                };
                let (first, second) = (&mut first[..count], &mut second[..count]);
                wide!(kernels, adam.run(sums, scale, master, first, second));
            }
        }
    }
}

impl Sgd {
    #[inline(always)]
    fn plain(&self, sums: &[f32], scale: f32, master: &mut [f32]) {
        for (value, sum) in master.iter_mut().zip(sums) {
            let gradient = sum * scale + self.weight_decay * *value;
            *value += self.rate * gradient;
        }
    }

    #[inline(always)]
    fn with_momentum(&self, sums: &[f32], scale: f32, master: &mut [f32], first: &mut [f32]) {
        // A first step keeps nothing of what was there, and takes the gradient whole.
        let (kept, taken) = self.taken.map_or((0.0, 1.0), |taken| (self.momentum, taken));
        for ((value, moved), sum) in master.iter_mut().zip(first).zip(sums) {
            let gradient = sum * scale + self.weight_decay * *value;
            *moved = kept * *moved + taken * gradient;
            let step = if self.nesterov { gradient + self.momentum * *moved } else { *moved };
            *value += self.rate * step;
        }
    }
}

impl Adam {
    #[inline(always)]
    fn run(
        &self,
        sums: &[f32],
        scale: f32,
        master: &mut [f32],
        first: &mut [f32],
        second: &mut [f32],
    ) {
        let shrunk = self.shrunk.unwrap_or(1.0);
        let slots = master.iter_mut().zip(first).zip(second);
        for (((value, mean), square), sum) in slots.zip(sums) {
            let gradient = sum * scale + self.weight_decay * *value;
            *value *= shrunk;
            *mean += self.news * (gradient - *mean);
            *square = self.beta2 * *square + self.square_news * gradient * gradient;
            let root = square.sqrt() / self.root + self.eps;
            *value += self.step_size * *mean / root;
        }
    }
}
