// Tensors whose elements are made right before they are encoded, so that they are encoded while they are in the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace deltawire {

class Preparation {
public:
    static constexpr size_t kNone = ~size_t(0);

    // Makes elements for one thread.
    class Reader {
    public:
        virtual ~Reader() = default;
        // Returns some bytes of a tensor, at most `kPieceBytes`. They are valid until the next call.
        virtual const uint8_t* read(size_t number, uint64_t first_byte, uint32_t bytes) = 0;
    };

    virtual ~Preparation() = default;
    // Returns the number of the tensor at an address, or `kNone` if this does not make the tensor.
    virtual size_t find(const uint8_t* address) const = 0;
    // Returns how many bytes of a tensor are made together at most.
    virtual uint64_t unit_bytes(size_t number) const = 0;
    virtual std::unique_ptr<Reader> reader() = 0;
    // Ends a pass over all elements. Returns whether elements are other ones than the readers returned: then the tensors must be encoded again. No reader
    // may be in use.
    virtual bool settle(unsigned threads) = 0;
};

}  // namespace deltawire
