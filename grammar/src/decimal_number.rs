//! Exact decimal numbers in JSON schemas, used to check the 32-bit arithmetic of llguidance.

use serde_json::Number;

/// Positive decimal number: `coefficient` times ten to the power of `-places`, without trailing zeros after
/// the decimal point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DecimalNumber {
    coefficient: u128,
    pub(super) places: u32,
}

impl DecimalNumber {
    /// Converts a JSON number; `None` if the number is not positive or its digits do not fit in 128 bits.
    pub(super) fn from_number(number: &Number) -> Option<Self> {
        let text = number.to_string();
        let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((&text, "0"));
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let coefficient: u128 = format!("{whole}{fraction}").parse().ok()?;
        let places = fraction.len() as i64 - exponent.parse::<i64>().ok()?;
        if coefficient == 0 {
            return None;
        }
        let shift = u32::try_from(-places.min(0)).ok()?;
        let coefficient = coefficient.checked_mul(10_u128.checked_pow(shift)?)?;
        let places = u32::try_from(places.max(0)).ok()?;
        Some(Self { coefficient, places }.reduced())
    }

    fn reduced(mut self) -> Self {
        while self.places > 0 && self.coefficient.is_multiple_of(10) {
            self.coefficient /= 10;
            self.places -= 1;
        }
        self
    }

    /// Returns a multiple of this number with at most `places` decimal places; the number itself if it
    /// already has at most `places` decimal places.
    pub(super) fn coarser(self, places: u32) -> Self {
        // Dropping decimal places while keeping the coefficient multiplies the number by a power of ten.
        Self { coefficient: self.coefficient, places: self.places.min(places) }.reduced()
    }

    /// Returns the double nearest to this number.
    pub(super) fn to_double(self) -> f64 {
        self.coefficient as f64 / 10_f64.powi(self.places as i32)
    }

    /// Whether every remainder of a division by this number fits in llguidance's 32-bit integers.
    pub(super) fn fits_library(self) -> bool {
        let max_remainder = 10_u128
            .checked_pow(self.places)
            .and_then(|unit| self.coefficient.checked_mul(10)?.checked_add(unit.checked_mul(9)?));
        max_remainder.is_some_and(|max_remainder| max_remainder <= u128::from(u32::MAX))
    }

    /// Converts a double as llguidance does: by multiplying it by ten until no fraction is left. `None` if
    /// the result does not fit in 32 bits.
    pub(super) fn as_read_by_library(double: f64) -> Option<Self> {
        let (mut value, mut places) = (double, 0);
        while value.fract() != 0.0 {
            value *= 10.0;
            places += 1;
        }
        let fits = value <= f64::from(u32::MAX);
        fits.then(|| Self { coefficient: value as u128, places }.reduced())
    }

    /// Returns both coefficients, scaled to a common number of decimal places.
    fn aligned(self, other: Self) -> Option<(u128, u128)> {
        let scaled = |number: Self, places: u32| {
            number
                .coefficient
                .checked_mul(10_u128.checked_pow(places.saturating_sub(number.places))?)
        };
        Some((scaled(self, other.places)?, scaled(other, self.places)?))
    }

    /// Returns the least common multiple of both numbers; `None` if llguidance's computation of this
    /// multiple would overflow.
    pub(super) fn common_multiple(self, other: Self) -> Option<Self> {
        let (a, b) = self.aligned(other)?;
        let product = a.checked_mul(b).filter(|product| *product <= u128::from(u32::MAX))?;
        let places = self.places.max(other.places);
        let multiple = Self { coefficient: product / greatest_divisor(a, b), places }.reduced();
        multiple.fits_library().then_some(multiple)
    }
}

fn greatest_divisor(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}
