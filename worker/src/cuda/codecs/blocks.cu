// Codecs of which each element, or each block of 128, is encoded by itself: as many threads work on a
// part as the GPU has to spare.

#include "elements.cuh"

// Threads of a block of the grid, as the host launches them.
#define THREADS 256
// Elements that share a scale, and of them those of each thread of the warp that has them.
#define BLOCK 128
#define EACH 4

DEVICE u32 thread_of_grid() { return __nvvm_read_ptx_sreg_ctaid_x() * THREADS + thread(); }
DEVICE u32 threads_of_grid() { return __nvvm_read_ptx_sreg_nctaid_x() * THREADS; }

// ---- 16-bit floats on the wire

template <class Element, class Wire, bool REST = false>
DEVICE void encode_half(u32 elements, void *source, void *wire) {
    typename Element::Memory *from = (typename Element::Memory *)source;
    u16 *to = (u16 *)wire;
    for (u32 i = thread_of_grid(); i < elements; i += threads_of_grid()) {
        float value = Element::load(from[i]);
        u16 code = Wire::store(value);
        to[i] = code;
        if (REST) from[i] = Element::store(rest_of(value, Wire::load(code)));
    }
}

template <class Element, class Wire>
DEVICE void decode_half(u32 elements, const void *wire, void *target) {
    const u16 *from = (const u16 *)wire;
    typename Element::Memory *to = (typename Element::Memory *)target;
    for (u32 i = thread_of_grid(); i < elements; i += threads_of_grid()) {
        to[i] = Element::store(Wire::load(from[i]));
    }
}

// ---- One byte an element, and a scale for each block

struct Int8 {
    DEVICE float max() { return 127.0f; }

    DEVICE float clamp(float scaled) {
        if (scaled > max()) scaled = max();
        return scaled < -max() ? -max() : scaled;
    }

    DEVICE u32 nearest(float scaled) { return bits_of(clamp(scaled) + 12582912.0f) & 0xff; }

    DEVICE u32 random(float scaled, u32 noise) {
        u32 fixed = bits_of(clamp(scaled) + 384.0f);
        u32 whole = (fixed + (noise >> 17)) >> 15;
        return (whole - (bits_of(384.0f) >> 15)) & 0xff;
    }

    DEVICE float value(u32 code) { return (float)(signed char)code; }
};

// A sign, 7 - MANTISSA bits of exponent, and MANTISSA bits.
template <u32 MANTISSA>
struct Float8 {
    static const u32 SHIFT = 23 - MANTISSA;
    static const u32 BIAS = 127 - ((1u << (6 - MANTISSA)) - 1);
    static const u32 CODE_MAX = MANTISSA == 3 ? 0x7e : 0x7b;

    DEVICE float max() { return MANTISSA == 3 ? 448.0f : 57344.0f; }
    DEVICE float normal_min() { return float_of((BIAS + 1) << 23); }
    DEVICE float whole() { return float_of((BIAS + 1 + SHIFT) << 23); }

    DEVICE u32 with_sign(float scaled, u32 code) {
        return (bits_of(scaled) >> 24 & 0x80) | (code > CODE_MAX ? CODE_MAX : code);
    }

    DEVICE u32 nearest(float scaled) {
        u32 bits = bits_of(scaled) & MAGNITUDE;
        float magnitude = float_of(bits);
        u32 odd = bits >> SHIFT & 1;
        u32 normal = ((bits + (1u << (SHIFT - 1)) - 1 + odd) >> SHIFT) - (BIAS << MANTISSA);
        u32 subnormal = bits_of(magnitude + whole()) - bits_of(whole());
        return with_sign(scaled, magnitude < normal_min() ? subnormal : normal);
    }

    DEVICE u32 random(float scaled, u32 noise) {
        float magnitude = float_of(bits_of(scaled) & MAGNITUDE);
        bool is_normal = magnitude >= normal_min();
        float fixed = is_normal ? magnitude : magnitude + normal_min();
        u32 code = (bits_of(fixed) + (noise >> (32 - SHIFT))) >> SHIFT;
        u32 bias = is_normal ? BIAS : BIAS + 1;
        return with_sign(scaled, code - (bias << MANTISSA));
    }

    DEVICE float value(u32 code) {
        u32 magnitude = code & 0x7f;
        u32 shifted = magnitude << SHIFT;
        float one_above = float_of(shifted + ((BIAS + 1) << 23));
        u32 bits = shifted + (BIAS << 23);
        if (magnitude < (1u << MANTISSA)) bits = bits_of(one_above - normal_min());
        if (magnitude > CODE_MAX) bits = shifted | INFINITY_BITS;
        return float_of(bits | (code & 0x80) << 24);
    }
};

typedef Float8<3> E4m3;
typedef Float8<2> E5m2;

// A warp takes a block, and a thread of it four neighbours.
template <class Element, class Code, bool REST = false>
DEVICE void encode_scaled(u32 elements, void *source, void *wire, u32 is_random, u64 draw) {
    Noise noise = Noise::of(0, draw);
    typename Element::Memory *from = (typename Element::Memory *)source;
    u32 place = lane();
    u32 blocks = (elements + BLOCK - 1) / BLOCK;
    for (u32 block = thread_of_grid() / WARP; block < blocks; block += threads_of_grid() / WARP) {
        u32 first = block * BLOCK + place * EACH;
        float values[EACH];
        u32 largest = 0;
        for (u32 i = 0; i < EACH; i++) {
            values[i] = first + i < elements ? Element::load(from[first + i]) : 0.0f;
            u32 magnitude = bits_of(values[i]) & MAGNITUDE;
            if (magnitude > largest) largest = magnitude;
        }
        largest = largest_of_warp(largest);
        bool is_finite = largest < INFINITY_BITS;
        float scale = float_of(largest) / Code::max();
        if (scale < float_of(SMALLEST_NORMAL_BITS)) scale = float_of(SMALLEST_NORMAL_BITS);
        u32 codes = 0;
        for (u32 i = 0; i < EACH && is_finite; i++) {
            float scaled = values[i] / scale;
            u32 code = is_random ? Code::random(scaled, Noise::at(noise, first + i))
                                 : Code::nearest(scaled);
            codes |= code << (8 * i);
        }
        for (u32 i = 0; REST && i < EACH && first + i < elements; i++) {
            // A block that is sent as NaN leaves nothing.
            float sent = Code::value(codes >> (8 * i) & 0xff) * scale;
            from[first + i] = Element::store(is_finite ? rest_of(values[i], sent) : 0.0f);
        }
        u8 *out = (u8 *)wire + (u64)block * (sizeof(float) + BLOCK);
        if (place == 0) *(u32 *)out = is_finite ? bits_of(scale) : NAN_BITS;
        out += sizeof(float) + place * EACH;
        if (first + EACH <= elements) {
            *(u32 *)out = codes;
        } else {
            for (u32 i = 0; first + i < elements; i++) out[i] = (u8)(codes >> (8 * i));
        }
    }
}

template <class Element, class Code>
DEVICE void decode_scaled(u32 elements, const void *wire, void *target) {
    typename Element::Memory *to = (typename Element::Memory *)target;
    u32 place = lane();
    u32 blocks = (elements + BLOCK - 1) / BLOCK;
    for (u32 block = thread_of_grid() / WARP; block < blocks; block += threads_of_grid() / WARP) {
        const u8 *in = (const u8 *)wire + (u64)block * (sizeof(float) + BLOCK);
        float scale = *(const float *)in;
        u32 first = block * BLOCK + place * EACH;
        in += sizeof(float) + place * EACH;
        u32 codes = 0;
        if (first + EACH <= elements) {
            codes = *(const u32 *)in;
        } else {
            for (u32 i = 0; first + i < elements; i++) codes |= (u32)in[i] << (8 * i);
        }
        for (u32 i = 0; i < EACH && first + i < elements; i++) {
            to[first + i] = Element::store(Code::value(codes >> (8 * i) & 0xff) * scale);
        }
    }
}

#define HALF(codec, Wire, element, Element)                                                       \
    KERNELS(KERNEL, codec, element, (encode_half<Element, Wire>(elements, tensor, wire)),         \
            (decode_half<Element, Wire>(elements, wire, tensor)))

#define SCALED(codec, Code, element, Element)                                                     \
    KERNELS(KERNEL, codec, element,                                                               \
            (encode_scaled<Element, Code>(elements, tensor, wire, option, draw)),                 \
            (decode_scaled<Element, Code>(elements, wire, tensor)))

#define HALF_KEEPER(codec, Wire)                                                                  \
    KEEPER(KERNEL, codec, (encode_half<F32, Wire, true>(elements, tensor, wire)))

#define SCALED_KEEPER(codec, Code)                                                                \
    KEEPER(KERNEL, codec, (encode_scaled<F32, Code, true>(elements, tensor, wire, option, draw)))

#define ALL(element, Element)                                                                     \
    HALF(fp16, F16, element, Element)                                                             \
    HALF(bf16, BF16, element, Element)                                                            \
    SCALED(fp8_e4m3, E4m3, element, Element)                                                      \
    SCALED(fp8_e5m2, E5m2, element, Element)                                                      \
    SCALED(int8, Int8, element, Element)

EACH_ELEMENT(ALL)

HALF_KEEPER(fp16, F16)
HALF_KEEPER(bf16, BF16)
SCALED_KEEPER(fp8_e4m3, E4m3)
SCALED_KEEPER(fp8_e5m2, E5m2)
SCALED_KEEPER(int8, Int8)
